"""A shard lies within the whole parameter while there is one: `fully_shard` alone keeps both all the time.

Shards are cut along the first dimension, so that each is one piece of the memory that its parameter is gathered into.
As long as that is there, the shard's DTensor points into it, and the shard's own memory is freed; before it goes, the
piece is copied back. Optimizers, checkpoints and callbacks may read the shard at any time. What is written to it, or to
the same elements of the whole parameter, is kept. A view of a shard that is taken meanwhile lasts as long as a view of
the whole parameter; one that was taken before is noticed, and keeps the shard's memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.compat import local_part, num_holders, set_local_part, shard_memory, sharded_records


def alias_shards(module: nn.Module) -> None:
    """Let the shards of a module's parameters have no memory of their own while the parameters are whole.

    Args:
        module: `fully_shard` was called on it, and nobody looks at its shards yet.
    """
    for record in sharded_records(module):
        _Shard(record)


class _Shard:
    """Steps between two of `fully_shard`'s: all ways from a shard to the whole and back lead through these methods.

    Args:
        record: What `fully_shard` knows of one parameter.
    """

    def __init__(self, record: Any) -> None:
        self._record, self._memory = record, shard_memory(record)
        self._num_holders = num_holders(self._memory)
        self._own: Tensor | None = None  # what the DTensor has while the parameter is not whole
        self._to_whole, self._to_shard = record.to_unsharded, record.to_sharded
        record.to_unsharded, record.to_sharded = self._unshard, self._reshard

    def _unshard(self) -> None:
        self._to_whole()
        if self._own is None and self._may_go():
            self._own = local_part(self._record.sharded_param)
            piece = self._piece()[: self._own.numel()]  # without padding
            set_local_part(self._record.sharded_param, piece.view(self._own.shape))
            self._memory.untyped_storage().resize_(0)

    def _reshard(self) -> None:
        if self._own is not None:
            with torch.no_grad():
                self._memory.untyped_storage().resize_(self._memory.numel() * self._memory.itemsize)
                self._memory.copy_(self._piece())
            set_local_part(self._record.sharded_param, self._own)
            self._own = None
        self._to_shard()

    def _may_go(self) -> bool:
        """Whether the gathered memory is of one kind with the shard's, and nobody else holds the latter."""
        gathered = self._record.all_gather_outputs[0]
        is_alike = gathered.dtype == self._memory.dtype and gathered.device == self._memory.device
        is_all = self._memory.untyped_storage().nbytes() == self._memory.nbytes
        is_ours = shard_memory(self._record) is self._memory and num_holders(self._memory) == self._num_holders
        return is_alike and is_all and is_ours

    def _piece(self) -> Tensor:
        """This rank's part of the gathered memory, flat, with padding."""
        with torch.no_grad():
            gathered: Tensor = self._record.all_gather_outputs[0]
            return gathered.narrow(0, self._record.mesh_info.shard_mesh_rank * len(self._memory), len(self._memory))
