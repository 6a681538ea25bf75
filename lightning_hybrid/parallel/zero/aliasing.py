"""A shard lies within the whole parameter while there is one: `fully_shard` alone keeps both all the time.

Shards are cut along the first dimension, so that each is one piece of the memory that its parameter is gathered into.
As long as that is there, the shard's DTensor points into it, and the shard's own memory is freed; before it goes, the
piece is copied back. Optimizers, checkpoints and callbacks may read the shard at any time. What is written to it, or to
the same elements of the whole parameter, is kept. A view of a shard that is taken meanwhile lasts as long as a view of
the whole parameter; one that was taken before is noticed, and keeps the shard's memory; `numpy` does so for good.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.compat import (
    around_states,
    local_part,
    num_holders,
    set_local_part,
    shard_memory,
    sharded_groups,
)


def alias_shards(module: nn.Module) -> None:
    """Let the shards of a module's parameters have no memory of their own while the parameters are whole.

    Args:
        module: `fully_shard` was called on it, and nobody looks at its shards yet.
    """
    for group in sharded_groups(module):
        shards = [_Shard(record) for record in group.fsdp_params]
        around_states(group, after_whole=_each(shards, _Shard.lend), before_shard=_each(shards, _Shard.take_back))


def _each(shards: list[_Shard], step: Callable[[_Shard], None]) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            for shard in shards:
                step(shard)

    return run


class _Shard:
    """One parameter's shard; this runs for every parameter in every step, so what stays the same is found out once.

    Args:
        record: What `fully_shard` knows of the parameter.
    """

    def __init__(self, record: Any) -> None:
        self._record, self._memory = record, shard_memory(record)
        self._storage, self._num_bytes = self._memory.untyped_storage(), self._memory.nbytes
        self._num_holders = num_holders(self._memory)
        self._own: Tensor | None = None  # what the DTensor has while the parameter is not whole
        self._gathered: Tensor | None = None

    def lend(self) -> None:
        """The parameter has just become whole."""
        if self._gathered is not self._record.all_gather_outputs[0]:
            self._find_piece()
        if self._own is None and self._may_go():
            self._own = local_part(self._record.sharded_param)
            set_local_part(self._record.sharded_param, self._part)
            self._storage.resize_(0)

    def take_back(self) -> None:
        """The whole parameter is about to be freed."""
        if self._own is not None:
            self._storage.resize_(self._num_bytes)
            self._memory.copy_(self._piece)
            set_local_part(self._record.sharded_param, self._own)
            self._own = None

    @torch.inference_mode(False)
    def _find_piece(self) -> None:
        """This rank's part of the gathered memory, which is one tensor for good: flat, and without padding in shape."""
        gathered: Tensor = self._record.all_gather_outputs[0]
        part = local_part(self._record.sharded_param)
        size = len(self._memory)
        self._piece = gathered.detach().narrow(0, self._record.mesh_info.shard_mesh_rank * size, size)
        self._part = self._piece[: part.numel()].view(part.shape)
        is_alike = gathered.dtype == self._memory.dtype and gathered.device == self._memory.device
        self._is_apt = is_alike and self._storage.nbytes() == self._num_bytes
        self._gathered = gathered

    def _may_go(self) -> bool:
        """Whether the gathered memory is of one kind with the shard's, and nobody else holds the latter or has.

        A storage that numpy has seen is not resizable any more, even when nobody looks at it.
        """
        is_ours = shard_memory(self._record) is self._memory and num_holders(self._memory) == self._num_holders
        return self._is_apt and is_ours and self._storage.resizable()
