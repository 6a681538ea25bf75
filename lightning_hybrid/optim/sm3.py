"""SM3: Adagrad's sums of squares, covered by one vector for each dimension."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from lightning_hybrid.compat import foreach
from lightning_hybrid.optim.arguments import check_at_least, check_fraction, check_range
from lightning_hybrid.optim.base import Member, Request, Update, WholeTensorOptimizer, collapse
from lightning_hybrid.optim.wholes import Contribution


class SM3(WholeTensorOptimizer):
    """Adagrad with bounds of its sums of squares, which need a vector for each dimension of a tensor.

    A tensor w with gradient g has an accumulator for each of its dimensions, here mu for the first and eta for the
    second::

        nu[i, j] = min(mu[i], eta[j]) + g[i, j]^2
        mu[i] = max over j of nu[i, j],   eta[j] = max over i of nu[i, j]
        m[i, j] = momentum m[i, j] + (1 - momentum) g[i, j] / sqrt(nu[i, j])
        w = w - lr m

    Maxima are those of whole tensors, however they are sharded. nu is at least the sum of all g^2 so far. For tensors
    of fewer than two dimensions it is that sum: these go as Adagrad lets them. Where nu is 0, g counts as 0.

    Args:
        params: Parameters or groups.
        lr: Rate, on the scale of Adagrad's and not of Adam's.
        momentum: From 0 to below 1; 0 keeps no m.
        weight_decay: Decoupled: weights are first multiplied by 1 - lr * weight_decay, so that what is accumulated are
            squares of gradients alone.

    Raises:
        ValueError: If an option is outside its range.

    Source: Anil, Gupta, Koren and Singer, Memory-Efficient Adaptive Optimization (2019), algorithm SM3-II; momentum as
    in the authors' code.
    """

    def __init__(
        self, params: ParamsT, lr: float | Tensor, *, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        check_at_least(self, 0, lr=lr, weight_decay=weight_decay)
        check_fraction(self, momentum=momentum)
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @override
    def update(self, group: dict[str, Any], members: Sequence[Member]) -> Update:
        """As `WholeTensorOptimizer` says."""
        check_range(self, members[0].data.dtype)
        data, gradients = [member.data for member in members], [member.gradient for member in members]
        accumulators = [accumulators_of(member) for member in members]
        sums = bounds(accumulators)
        foreach("addcmul_")(sums, gradients, gradients)
        found = yield Request(
            [part for m, values in zip(members, sums, strict=True) for part in maxima(m, values)], "max"
        )
        foreach("copy_")([entry for entries in accumulators for entry in entries], found)
        foreach("rsqrt_")(sums)
        lr, momentum = float(group["lr"]), group["momentum"]
        if group["weight_decay"]:
            foreach("mul_")(data, 1 - lr * group["weight_decay"])
        if not momentum:
            foreach("addcmul_")(data, gradients, sums, value=-lr)
            return
        buffers = [member.entry("momentum_buffer") for member in members]
        foreach("mul_")(buffers, momentum)
        foreach("addcmul_")(buffers, gradients, sums, value=1 - momentum)
        foreach("add_")(data, buffers, alpha=-lr)

    @override
    def collapsed(self, entry: str, shape: Sequence[int]) -> frozenset[int]:
        """As `WholeTensorOptimizer` says."""
        kind, _, dim = entry.rpartition("_")
        return others(int(dim), len(shape)) if kind == "accumulator" else frozenset()


def others(dim: int, ndim: int) -> frozenset[int]:
    """All dimensions but one."""
    return frozenset(range(ndim)) - {dim}


def accumulators_of(member: Member) -> list[Tensor]:
    """One for each dimension, with length 1 in the others; one for a scalar."""
    ndim = len(member.shape)
    return [member.entry(f"accumulator_{dim}", others(dim, ndim)) for dim in range(max(1, ndim))]


def bounds(accumulators: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Least accumulator of each element, in new memory.

    A normal number stands for 0, which leaves sums as they are and has a finite inverse root.
    """
    least = torch.finfo(accumulators[0][0].dtype).tiny
    above = iter(foreach("clamp_min")([entry for entries in accumulators for entry in entries], least))
    return [reduce(torch.minimum, reversed([next(above) for _ in entries])) for entries in accumulators]


def maxima(member: Member, sums: Tensor) -> list[Contribution]:
    """The largest sum of each slice, along all dimensions."""
    ndim, parts = len(member.shape), []
    for dim in range(max(1, ndim)):
        parts.append(member.part(maximum(sums, range(dim + 1, ndim)), others(dim, ndim)))
        sums = maximum(sums, range(dim, dim + 1)) if dim + 1 < ndim else sums  # what later ones need
    return parts


def maximum(values: Tensor, dims: Sequence[int]) -> Tensor:
    """The largest along dimensions, which stay with length 1; 0 where there is none, as sums are not negative."""
    if not dims:
        return values
    if not values.numel():
        return values.new_zeros(collapse(values.shape, dims))
    return values.amax(tuple(dims), keepdim=True)
