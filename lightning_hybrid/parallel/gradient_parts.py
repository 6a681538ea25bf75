"""Where gradients lie in those of whole parameters, under strategies whose parameters tell of it themselves."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_hybrid.functional.boxes import Box
from lightning_hybrid.parallel.checkpoint.parts import Part, Piece


def held_parts(named: Iterable[tuple[str, Tensor]], optimizer: Optimizer) -> dict[str, Part]:
    """What this rank has of the gradients of an optimizer's parameters.

    A gradient whose sum over ranks has not been made, as tensor parallelism leaves some, is summed first; all ranks
    call it together.

    Args:
        named: Parameters by name; plain tensors are whole, and DTensors sharded in any way that `shard_box` knows.
        optimizer: Its parameters count.

    Returns:
        By name, views of the gradients, for those parameters that have one.
    """
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    parts = {}
    for name, parameter in named:
        gradient = parameter.grad
        if parameter not in held or gradient is None:
            continue
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
            if gradient.placements != parameter.placements:
                gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
            box, data = shard_box(gradient), gradient.to_local().detach()
        else:
            box, data = Box.of(gradient.shape), gradient.detach()
        pieces = (Piece(box, data),) if prod(box.sizes) else ()
        parts[name] = Part(tuple(gradient.shape), gradient.dtype, pieces)
    return parts


def shard_box(tensor: DTensor) -> Box:
    """The part of a DTensor that this rank has, cut as `torch.chunk` cuts.

    Several dimensions of a mesh may deal out one of the tensor, from the outermost to the innermost; those with a split
    factor come last, as `fully_shard` deals out what tensor parallelism has dealt out before.

    Raises:
        ValueError: If a placement is neither a shard nor a replica, or the part has other sizes than that.
    """
    offsets, sizes = [0] * tensor.ndim, list(tensor.shape)
    placed = list(enumerate(tensor.placements))
    for dim, placement in sorted(placed, key=lambda item: getattr(item[1], "split_factor", 1) > 1):
        if placement.is_replicate():
            continue
        along = getattr(placement, "dim", None)
        if along is None:
            raise ValueError(f"A tensor has placements {tensor.placements}; only shards and replicas have a place.")
        each = -(-sizes[along] // tensor.device_mesh.size(dim))
        begin = min(sizes[along], tensor.device_mesh.get_local_rank(dim) * each)
        offsets[along], sizes[along] = offsets[along] + begin, min(each, sizes[along] - begin)
    here = tensor.to_local().shape
    if tuple(here) != tuple(sizes):
        raise ValueError(
            f"A tensor with placements {tensor.placements} has sizes {list(here)} here instead of {sizes}: it is dealt "
            "out unevenly in a way of its own. Choose sizes that the mesh divides, or strategy='hybrid_ptdp'."
        )
    return Box(tuple(offsets), tuple(sizes))
