"""Plans of `torch.distributed.checkpoint` over parts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from typing_extensions import override

from lightning_hybrid.parallel.checkpoint.parts import Part, Parts, Piece, all_pieces


class PartsSavePlanner(DefaultSavePlanner):
    """Writes each box once, of the ranks that hold it the one with the least to write.

    Args:
        parts: What this rank has.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {(name, piece.box.offsets): piece for name, _, piece in all_pieces(parts)}
        self._parts = parts

    @override
    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(name, part, piece) for name, part, piece in all_pieces(self._parts)])
        return self.plan

    @override
    def resolve_data(self, write_item: WriteItem) -> Tensor:
        name, offsets = key_of(write_item.index)
        return self._pieces[name, offsets].data.detach()


def key_of(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    """A chunk's tensor and where it begins in it."""
    return index.fqn, tuple(index.offset or ())


def _write_item(name: str, part: Part, piece: Piece) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(piece.box.offsets), torch.Size(piece.box.sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=part.dtype), torch.Size(part.shape))
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)
