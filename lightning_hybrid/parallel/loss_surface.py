"""The mean loss on fixed data of all ranks, as a function of parameters that every rank has whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_hybrid.parallel.pipeline.snapshot import Snapshot

NOISE = 1000  # times a type's rounding: that far apart may two losses of the same data be
MINE = "Measure a copy of the module with whole parameters in one process, for instance from a checkpoint."


class Term(NamedTuple):
    """A loss that counts.

    Attributes:
        closure: Gives the scalar loss, called with the inputs.
        inputs: Its arguments.
        weight: How much it counts.
    """

    closure: Callable[..., Tensor]
    inputs: tuple[Any, ...]
    weight: float


class LossSurface:
    """The weighted mean of the terms of all ranks, around a module's parameters that need gradients.

    All ranks ask for the same in the same order and get the same. Losses are in the parameters' own types, without
    autocast. Offsets and vectors are lists of tensors in the order of `parameters`.

    Args:
        module: It has the same whole parameters on all ranks.
        terms: Losses of this rank, at least one.
        group: The ranks; None for this process alone.

    Attributes:
        parameters: Those that need gradients.
    """

    def __init__(self, module: nn.Module, terms: Sequence[Term], group: dist.ProcessGroup | None) -> None:
        self._module, self._terms, self._group = module, terms, group
        self.parameters = measured_parameters(module)
        self._centre: list[Tensor] = []
        self._total = 1.0

    @contextmanager
    def open(self) -> Iterator[None]:
        """Context in which the surface can be asked; then parameters, buffers and random streams are as before.

        Raises:
            ValueError: If ranks have different parameters, or a loss is another at its second call.
        """
        with torch.inference_mode(False), torch.no_grad(), Snapshot(self._module, self._device):
            self._centre = [parameter.clone() for parameter in self.parameters]
            try:
                self._total = self._sum(sum(term.weight for term in self._terms))
                self._check_same()
                self._check_repeatable()
                yield
            finally:
                self._move(None)
                self._centre = []

    def loss(self, offset: Sequence[Tensor] | None) -> float:
        """Mean loss there."""
        self._move(offset)
        with torch.no_grad():
            return self._sum(sum(term.weight * float(self._call(term)) for term in self._terms)) / self._total

    def gradient(self, offset: Sequence[Tensor] | None) -> list[Tensor]:
        """Its gradient there."""
        self._move(offset)
        return self._over_terms(lambda loss: self._derivatives(loss))

    def product(self, vector: Sequence[Tensor]) -> list[Tensor]:
        """The Hessian at the parameters times a vector, by two backward passes.

        Source: Yao et al. 2020, arXiv:1912.07145, section 3: the gradient of the slope along the vector.
        """

        def times(loss: Tensor) -> list[Tensor]:
            slopes = self._derivatives(loss, create_graph=True)
            return self._derivatives(sum((g * v).sum() for g, v in zip(slopes, vector, strict=True)))  # type: ignore[arg-type]

        self._move(None)
        # other kernels of attention have no second derivatives, nor do compiled modules
        with sdpa_kernel(SDPBackend.MATH), torch.compiler.set_stance("force_eager"):
            return self._over_terms(times)

    @property
    def _device(self) -> torch.device:
        return self.parameters[0].device

    def _call(self, term: Term) -> Tensor:
        with torch.autocast(self._device.type, enabled=False):
            loss = term.closure(*term.inputs)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            raise TypeError(f"The closure returned {loss!r:.80}: it has to return the loss, a tensor of one number.")
        return loss

    def _derivatives(self, value: Tensor, *, create_graph: bool = False) -> list[Tensor]:
        if not value.requires_grad:  # it does not depend on parameters, or only linearly
            return [torch.zeros_like(parameter) for parameter in self.parameters]
        return list(
            torch.autograd.grad(
                value.sum(), self.parameters, create_graph=create_graph, allow_unused=True, materialize_grads=True
            )
        )

    def _over_terms(self, derive: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
        """The mean over all terms of all ranks."""
        total = [torch.zeros_like(centre) for centre in self._centre]
        for term in self._terms:
            with torch.enable_grad():
                parts = derive(self._call(term))
            for whole, part in zip(total, parts, strict=True):
                whole.add_(part.detach(), alpha=term.weight)
        if self._group is not None:
            _sum_over(total, self._group)
        for whole in total:
            whole.div_(self._total)
        return total

    @torch.no_grad()
    def _move(self, offset: Sequence[Tensor] | None) -> None:
        for number, (parameter, centre) in enumerate(zip(self.parameters, self._centre, strict=True)):
            parameter.copy_(centre if offset is None else centre + offset[number])

    def _sum(self, value: float) -> float:
        return self._reduced([value], dist.ReduceOp.SUM)[0]

    def _reduced(self, values: Sequence[float], operation: Any) -> list[float]:
        vector = torch.tensor(values, dtype=torch.float64, device=self._device)
        if self._group is not None:
            dist.all_reduce(vector, operation, group=self._group)
        return vector.tolist()

    def _check_same(self) -> None:
        sums = [float(part.double().sum()) for p in self.parameters for part in (p, p.abs())]
        prints = [float(len(self.parameters)), sum(sums[::2]), sum(sums[1::2])]
        prints = [value if isfinite(value) else 0.0 for value in prints]  # a run that has diverged has a measure, too
        highest = self._reduced([*prints, *(-value for value in prints)], dist.ReduceOp.MAX)
        if any(high != -low for high, low in zip(highest[:3], highest[3:], strict=True)):
            raise ValueError(
                f"Ranks have different parameters: here {prints[0]:.0f} with the sum {prints[1]!r}, elsewhere up to "
                f"{highest[1]!r}. What is measured must be the same on all ranks. {MINE}"
            )

    def _check_repeatable(self) -> None:
        losses = [[self._call(term) for term in self._terms] for _ in range(2)]
        pairs = [(float(a), float(b), NOISE * torch.finfo(a.dtype).eps) for a, b in zip(*losses, strict=True)]
        apart = next((pair for pair in pairs if abs(pair[0] - pair[1]) > pair[2] * max(map(abs, pair))), None)
        if self._reduced([float(apart is not None)], dist.ReduceOp.MAX)[0]:
            values = f"{apart[0]:g} and then {apart[1]:g}" if apart else "two values on another rank"
            raise ValueError(
                f"The closure returned {values} for the same parameters and data. Make it repeatable: call "
                "module.eval(), so that dropout is off, and draw no random numbers in it."
            )


def _sum_over(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum tensors over ranks in place, those of a type at once."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        some = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.flatten() for tensor in some])
        dist.all_reduce(flat, group=group)
        for tensor, part in zip(some, flat.split([tensor.numel() for tensor in some]), strict=True):
            tensor.copy_(part.view_as(tensor))


def measured_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that need gradients, each once.

    Raises:
        ValueError: If there is none, or they are not all here, of 32 bits or more, and apart from each other.
    """
    found = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not found:
        raise ValueError(f"{type(module).__name__} has no parameter with requires_grad=True to be moved.")
    for name, parameter in found.items():
        is_part = isinstance(parameter, DTensor | FlatParameter) or parameter.is_meta
        if is_part or not parameter.numel():
            raise ValueError(
                f"{name} is not whole here ({type(parameter).__name__}, {list(parameter.shape)}), and the measure is "
                f"of whole parameters. {MINE}"
            )
        if not parameter.is_floating_point() or parameter.element_size() < 4:
            raise ValueError(
                f"{name} is {parameter.dtype}, which rounds small moves away. Measure copy.deepcopy(module).float()."
            )
    if len({parameter.data_ptr() for parameter in found.values()}) < len(found):
        raise ValueError("Two parameters share memory, and cannot be moved apart. Tie them as one nn.Parameter.")
    return list(found.values())
