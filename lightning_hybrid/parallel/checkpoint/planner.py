"""Plans of `torch.distributed.checkpoint` over parts, and where in its files the elements of a tensor lie."""

from __future__ import annotations

from io import BytesIO, RawIOBase
from typing import BinaryIO
from zipfile import ZipFile

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

from lightning_hybrid.parallel.checkpoint.hollow import crc32
from lightning_hybrid.parallel.checkpoint.hollow_torch import LOCAL_SIZE, begin_of_record
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


def begin_of_elements(file: BinaryIO, offset: int, length: int) -> int:
    """First byte of a tensor's elements in what `torch.save` has written of it, a zip archive without compression.

    Args:
        file: The whole file.
        offset: First byte of the archive.
        length: Its length.
    """
    with ZipFile(_Section(file, offset, length)) as archive:
        record = next((r for r in archive.infolist() if r.filename.endswith("/data/0")), None)
    if record is None:
        return offset  # no elements
    file.seek(offset + record.header_offset)
    header = file.read(LOCAL_SIZE)
    return begin_of_record(offset + record.header_offset, header)


class _Section(RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._place = file, offset, length, 0

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = offset + {0: 0, 1: self._place, 2: self._length}[whence]
        return self._place

    @override
    def tell(self) -> int:
        return self._place

    @override
    def read(self, size: int = -1) -> bytes:
        self._file.seek(self._offset + self._place)
        left = self._length - self._place
        content = self._file.read(left if size < 0 else min(size, left))
        self._place += len(content)
        return content
