"""Where `fully_shard` has the gradients of an accumulation window that goes on, besides the shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_hybrid.compat import (
    local_part,
    partial_sum,
    set_partial_sum,
    shard_memory,
    sharded_groups,
    sharded_records,
)
from lightning_hybrid.parallel.checkpoint.places import Place, on_parameter
from lightning_hybrid.parallel.gradients import like_local
from lightning_hybrid.parallel.mesh import Peers


def places_of_replica(
    shard: nn.Parameter,
    whole: nn.Parameter | None,
    modules: Iterable[FSDPModule],
    peers: Peers,
    dtype: torch.dtype | None,
) -> Iterator[Place]:
    """The place of a gradient that is not summed before a window's end, whole: it waits in the type of the sum.

    Args:
        shard: Of the parameter.
        whole: What modules show in its place; None for what cannot have a gradient.
        modules: Units and buckets.
        peers: Who has slices of it.
        dtype: Type of the sum; None for the parameter's.
    """
    index, count = peers.rank, peers.size
    if whole is None:
        return
    if dtype in (None, whole.dtype):
        yield on_parameter(whole, "data", index, count)
        return
    record = next(r for module in modules for r in sharded_records(module) if r.sharded_param is shard)

    def put(gradient: Tensor) -> None:
        record.unsharded_accumulated_grad = gradient

    def empty() -> Tensor:
        return torch.empty_like(whole, dtype=dtype).detach()

    yield Place("data", index, count, lambda: record.unsharded_accumulated_grad, empty, put)


def places_of_copy(
    shard: nn.Parameter, modules: Iterable[FSDPModule], peers: Peers, dtype: torch.dtype | None
) -> Iterator[Place]:
    """The place of a gradient that is summed over one copy's shards, and over all copies at a window's end only."""
    for group in (group for module in modules for group in sharded_groups(module)):
        if any(record.sharded_param is shard for record in group.fsdp_params):
            sums = _PartialSum(group, shard, dtype)
            yield Place("copy", peers.copy, peers.replicate, sums.get, sums.empty, sums.put)


class _PartialSum:
    """One parameter's piece of the sum of all that travel together.

    Args:
        group: What `fully_shard` knows of them.
        shard: The parameter's.
        dtype: Type of the sum; None for the type of what modules show.
    """

    def __init__(self, group: Any, shard: nn.Parameter, dtype: torch.dtype | None) -> None:
        self._group, self._shard, self._dtype = group, shard, dtype

    def get(self) -> Tensor | None:
        """The piece, in the sum's memory."""
        flat = partial_sum(self._group)
        trained = self._trained()
        if flat is None or not any(record.sharded_param is self._shard for record in trained):
            return None
        sizes = [shard_memory(record).numel() for record in trained]
        if sum(sizes) != flat.numel():
            raise RuntimeError(
                f"Within an accumulation window the parameters that are trained have changed, from {flat.numel()} to "
                f"{sum(sizes)} elements of what is summed together: with replicate_size above 1 no checkpoint can be "
                "saved before the window ends. Freeze and thaw parameters between windows."
            )
        offset = next(
            offset
            for record, offset in zip(trained, accumulate(sizes, initial=0), strict=False)
            if record.sharded_param is self._shard
        )
        part = local_part(self._shard)  # type: ignore[arg-type]
        return like_local(flat[offset : offset + part.numel()].view(part.shape), self._shard)

    def empty(self) -> Tensor:
        """A shard in the sum's type and on the device of compute."""
        flat = self._flat()
        part = local_part(self._shard)  # type: ignore[arg-type]
        return like_local(torch.empty(part.shape, dtype=flat.dtype, device=flat.device), self._shard)

    def put(self, gradient: Tensor) -> None:
        """Copy it into its place."""
        if partial_sum(self._group) is None:
            set_partial_sum(self._group, self._flat())
        own = self.get()
        if own is not None:
            with torch.no_grad():
                local_part(own).copy_(local_part(gradient))  # type: ignore[arg-type]

    def _trained(self) -> list[Any]:
        return [record for record in self._group.fsdp_params if record.sharded_param.requires_grad]

    def _flat(self) -> Tensor:
        """The sum, or one of nothing."""
        flat = partial_sum(self._group)
        if flat is not None:
            return flat
        number = sum(shard_memory(record).numel() for record in self._trained())
        dtype = self._dtype or self._shard.dtype
        return torch.zeros(number, dtype=dtype, device=self._group.device)
