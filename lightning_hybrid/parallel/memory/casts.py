"""Which saved tensors are parameters in another type, as autocast makes them for an operation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_hybrid.parallel.ledgers.fixed import local_part

HEAD = 64
"""Elements that are looked at first."""


def is_cast(tensor: Tensor, module: nn.Module) -> bool:
    """Whether a cast has made a tensor's whole storage of a parameter that a module or one of its children has.

    Or of rows of one, as attention makes of a packed projection: from a multiple of their number on, or the last ones.
    Values are compared, for autograd does not tell where a tensor is from, and autocast looks switched off while it
    calls an operation.
    """
    flat = tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    return any(_is_cast_of(local_part(parameter), flat) for parameter in module.parameters())


def _is_cast_of(parameter: Tensor, flat: Tensor) -> bool:
    number, total = flat.numel(), parameter.numel()
    if parameter.dtype is flat.dtype or parameter.device != flat.device or not 0 < number <= total:
        return False
    if number % (total // len(parameter) if parameter.ndim else 1):
        return False
    memory, rest = _memory(parameter), total % number
    parts = memory[: total - rest].view(-1, number)
    alike = (parts[:, :HEAD].to(flat.dtype) == flat[:HEAD]).all(1).nonzero().view(-1).tolist()
    found = [parts[index] for index in alike] + ([memory[-number:]] if rest else [])
    return any(torch.equal(part.to(flat.dtype), flat) for part in found)


def _memory(parameter: Tensor) -> Tensor:
    """A parameter's elements in the order in which they lie, which a cast keeps."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    dense = parameter if reach == parameter.numel() else parameter.contiguous()
    return dense.detach().as_strided((parameter.numel(),), (1,))
