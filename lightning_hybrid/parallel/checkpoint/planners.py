"""Plans of `torch.distributed.checkpoint` over parts: what is written, and what is read back with its checksum."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from typing_extensions import override

from lightning_hybrid.functional.boxes import Box
from lightning_hybrid.parallel.checkpoint.manifest import Entry
from lightning_hybrid.parallel.checkpoint.parts import Part, Parts, Piece, all_pieces


def crc32(tensor: Tensor) -> int:
    """Checksum of a tensor's elements in memory order; it must be in host memory."""
    flat = tensor.detach().contiguous().view(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0


class PartsSavePlanner(DefaultSavePlanner):
    """Writes each box once, of the ranks that hold it the one with the least to write.

    Args:
        parts: What this rank has.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {(name, piece.box.offsets): piece for name, _, piece in all_pieces(parts)}
        self._parts = parts
        self.checksums = dict[tuple[str, tuple[int, ...]], int]()

    @override
    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(name, part, piece) for name, part, piece in all_pieces(self._parts)])
        return self.plan

    @override
    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        name, offsets = key_of(write_item.index)
        data = self._pieces[name, offsets].data.detach().to("cpu").contiguous()
        self.checksums[name, offsets] = crc32(data)
        return data


def key_of(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    """A chunk's tensor and where it begins in it."""
    return index.fqn, tuple(index.offset or ())


def _write_item(name: str, part: Part, piece: Piece) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(piece.box.offsets), torch.Size(piece.box.sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=part.dtype), torch.Size(part.shape))
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


class PartLoadPlanner(LoadPlanner):
    """Reads whole chunks of one tensor, compares their checksums, and fills pieces from them.

    Args:
        name: The tensor's.
        entry: What is stored of it.
        part: What to fill.
    """

    def __init__(self, name: str, entry: Entry, part: Part) -> None:
        self._name, self._entry, self._part = name, entry, part
        self._chunks = {
            chunk.box.offsets: chunk
            for chunk in entry.chunks
            if not part.shape or any(chunk.box.meet(piece.box) for piece in part.pieces)
        }

    def missing(self) -> int:
        """Elements of the pieces that no chunk has."""
        wanted = sum(piece.box.numel for piece in self._part.pieces)
        met = (chunk.box.meet(piece.box) for chunk in self._chunks.values() for piece in self._part.pieces)
        return wanted - sum(box.numel for box in met if box is not None)

    def file_of(self, item: ReadItem) -> str:
        """Name of the file that is read."""
        return self._chunks[key_of(item.storage_index)[1]].file

    @override
    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        """Everything is known."""

    @override
    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([_read_item(self._name, chunk.box) for chunk in self._chunks.values()])

    @override
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    @override
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    @override
    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        raise TypeError(f"{read_item.storage_index.fqn} is no tensor.")

    @override
    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return torch.empty(tuple(read_item.lengths), dtype=self._entry.torch_dtype)

    @override
    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        chunk = self._chunks[key_of(read_item.storage_index)[1]]
        if crc32(tensor) != chunk.crc32:
            raise ValueError("its bytes are not those that were written: the checksum differs")
        for piece in self._part.pieces:
            box = piece.box.meet(chunk.box)
            if box is not None:
                with torch.no_grad():
                    box.within(piece.box).view(piece.data).copy_(box.within(chunk.box).view(tensor))


def _read_item(name: str, box: Box) -> ReadItem:
    index, zeros = MetadataIndex(name, torch.Size(box.offsets)), torch.Size((0,) * len(box.sizes))
    return ReadItem(LoadItemType.TENSOR, index, zeros, index, zeros, torch.Size(box.sizes))


def stored_data(tensors: Mapping[str, Entry]) -> dict[MetadataIndex, Any]:
    """What `FileSystemReader` looks chunks up in; the manifest has it too, and is no pickle."""
    return {
        MetadataIndex(name, torch.Size(chunk.box.offsets)): _Stored(chunk.file, chunk.offset, chunk.length)
        for name, entry in tensors.items()
        for chunk in entry.chunks
    }


class _Stored:
    transform_descriptors = ()

    def __init__(self, relative_path: str, offset: int, length: int) -> None:
        self.relative_path, self.offset, self.length = relative_path, offset, length
