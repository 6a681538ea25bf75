"""Gradients over all axes: sums, one norm, clipping. Each parameter counts once, wherever its copies or shards live."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

BUCKET_BYTES = 25 * 2**20  # as in DDP; the C library's allocator also keeps that much for the next step


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that is in this rank's memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like_local(part: Tensor, like: Tensor) -> Tensor:
    """What `local` would give back, as a tensor that is sharded if `like` is."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def take_gradients(parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
    """Remove all gradients and return them, for `install_gradients`."""
    taken = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    for parameter, _ in taken:
        parameter.grad = None
    return taken


def install_gradients(taken: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    """Put gradients back, on top of what is there."""
    for parameter, gradient in taken:
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def sum_gradients(
    parameters: Sequence[nn.Parameter],
    group: dist.ProcessGroup,
    *,
    at_least: torch.dtype | None = None,
    device: torch.device | None = None,
) -> None:
    """Sum the gradients of the same parameters over the ranks of a group, in flat buckets.

    A parameter without a gradient on any rank stays without; one with a gradient on some rank gets the sum everywhere.

    Args:
        parameters: The same list, in order, on every rank.
        group: The ranks.
        at_least: Gradients of a lower precision are summed in this one, and rounded once; None sums in their own.
        device: Where the group communicates; None for where the parameters are.
    """
    if group.size() == 1 or not parameters:
        return
    device = device or local(parameters[0]).device
    present = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32, device=device)
    work = dist.all_reduce(present, group=group, async_op=True)
    for bucket in make_buckets(parameters):
        gradients = [local(p.grad if p.grad is not None else torch.zeros_like(p)) for p in bucket]
        flat = torch.cat([gradient.reshape(-1).to(device) for gradient in gradients])  # some may be on the host
        flat = flat.to(torch.promote_types(flat.dtype, at_least)) if at_least is not None else flat
        dist.all_reduce(flat, group=group)
        with torch.no_grad():
            for parameter, part in zip(bucket, flat.split([g.numel() for g in gradients]), strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                target = local(parameter.grad)
                target.copy_(part.view_as(target))
    assert work is not None
    work.wait()
    for parameter, ranks in zip(parameters, present.tolist(), strict=True):
        if not ranks:
            parameter.grad = None


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Make gradients the mean over the ranks of a group; a mean that was made before stays what it is."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    sum_gradients(trained, group)
    scale_gradients(trained, 1.0 / group.size())


def gradient_norm(parameters: Iterable[nn.Parameter], *, norm_type: float = 2.0, device: torch.device) -> Tensor:
    """Norm of the gradients of the whole model.

    Args:
        parameters: Those that this rank counts: over the world, each (or each shard of it) exactly once.
        norm_type: 2, infinity, or any other order above 0.
        device: Where the result is to be.

    Returns:
        Scalar float64, equal on all ranks.
    """
    gradients = [local(p.grad).detach() for p in parameters if p.grad is not None]
    gradients = [gradient for gradient in gradients if gradient.numel()]  # a shard may be empty
    norms = [
        torch.linalg.vector_norm(g, norm_type, dtype=torch.promote_types(g.dtype, torch.float32)) for g in gradients
    ]
    norms = [norm.double().to(device) for norm in norms]  # some gradients may be on the host
    stacked = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device=device)
    if math.isinf(norm_type):
        everyone = [torch.empty_like(stacked[0]) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, stacked.max())  # gloo's MAX loses NaN
        return torch.stack(everyone).max()
    total = stacked.pow(norm_type).sum()
    dist.all_reduce(total)
    return total.pow(1.0 / norm_type)


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor | float) -> None:
    """Multiply all gradients by one factor."""
    for gradient in (local(p.grad) for p in parameters if p.grad is not None):
        gradient.mul_(factor.to(gradient.device, gradient.dtype) if isinstance(factor, Tensor) else factor)


def divide_gradients(parameters: Iterable[nn.Parameter], total: float) -> None:
    """Divide by the total weight of a window; a window without weight has gradients of 0 and stays so."""
    if total > 0:
        for parameter in parameters:
            if parameter.grad is not None:
                with torch.no_grad():
                    parameter.grad.div_(total)


def make_buckets(parameters: Sequence[nn.Parameter], first_bytes: int | None = None) -> list[list[nn.Parameter]]:
    """Part parameters into buckets of one type, in order of their last members.

    Args:
        parameters: In order.
        first_bytes: Size of the first bucket of each type, if it is to be another.
    """
    full: list[list[nn.Parameter]] = []
    growing: dict[torch.dtype, list[nn.Parameter]] = {}
    sizes: dict[torch.dtype, int] = defaultdict(int)
    limits: dict[torch.dtype, int] = defaultdict(lambda: BUCKET_BYTES if first_bytes is None else first_bytes)
    for parameter in parameters:
        dtype, size = parameter.dtype, local(parameter).numel() * parameter.element_size()
        if dtype in growing and sizes[dtype] + size > limits[dtype]:
            full.append(growing.pop(dtype))
            sizes[dtype], limits[dtype] = 0, BUCKET_BYTES
        growing.setdefault(dtype, []).append(parameter)
        sizes[dtype] += size
    return full + list(growing.values())
