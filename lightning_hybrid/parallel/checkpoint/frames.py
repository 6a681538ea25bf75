"""What `torch.save` writes around the elements of a tensor, so that they go to the disk from where they lie.

`torch.save` itself copies them through Python's file objects and sums them up once more, which takes twice as long.
`torch.load`, `zipfile` and `torch.distributed.checkpoint` read both alike.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache
from tempfile import TemporaryFile

import torch
from torch import Tensor

from lightning_hybrid.parallel.checkpoint.hollow import BLOCK, byte_view, memory_of, write_at
from lightning_hybrid.parallel.checkpoint.hollow_torch import placeholder, records, save_without_elements


@dataclass(frozen=True)
class Frame:
    """The archive of a contiguous tensor but for its elements.

    Attributes:
        head: Before them.
        tail: After them, with 0 for their checksum.
        checksums: Where in the tail that belongs.
    """

    head: bytes
    tail: bytes
    checksums: tuple[int, ...]

    def tail_of(self, crc32: int) -> bytes:
        """The tail for elements of that checksum."""
        tail = bytearray(self.tail)
        for place in self.checksums:
            struct.pack_into("<I", tail, place, crc32)
        return bytes(tail)


@lru_cache(maxsize=1024)  # the blocks of a model have the same shapes
def frame_of(shape: tuple[int, ...], dtype: torch.dtype) -> Frame:
    """The frame of tensors of a shape and a type."""
    with TemporaryFile() as file:  # with a hole in place of the elements
        save_without_elements(placeholder(shape, dtype), file)
        (record,) = records(file).values()
        end = record.offset + record.nbytes
        file.seek(0)
        head = file.read(record.offset)
        file.seek(end)
        return Frame(head, file.read(), tuple(place - end for place in record.checksums))


@dataclass(frozen=True)
class Written:
    """Where an archive lies in a file.

    Attributes:
        offset: Its first byte.
        nbytes: Its length.
        begin: First byte of the elements.
        crc32: Of the elements.
    """

    offset: int
    nbytes: int
    begin: int
    crc32: int


class FrameWriter:
    """Writes one archive after the other into a new file.

    Args:
        path: The file's.

    Raises:
        OSError: If it cannot be written; so do the methods.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._end = self._begun = 0

    def write(self, tensor: Tensor) -> Written:
        """Append the archive of a tensor, which may be on any device."""
        offset, frame = self._end, frame_of(tuple(tensor.shape), tensor.dtype)
        self._append(memoryview(frame.head))
        begin, crc32 = self._end, 0
        for block in byte_view(tensor).split(BLOCK):
            content = memory_of(block)
            crc32 = zlib.crc32(content, crc32)  # while it is on its way through the processor's cache anyway
            self._append(content)
        self._append(memoryview(frame.tail_of(crc32)))
        return Written(offset, self._end - offset, begin, crc32)

    def close(self) -> None:
        """Wait until everything is on the disk."""
        try:
            os.fsync(self._handle)
        finally:
            os.close(self._handle)

    def _append(self, content: memoryview) -> None:
        write_at(self._handle, self._end, content)
        self._end += len(content)
        if self._end - self._begun >= BLOCK and hasattr(os, "posix_fadvise"):
            # The disk starts now instead of in fsync. Pages that are still to be written stay in memory, for a reader.
            os.posix_fadvise(self._handle, self._begun, self._end - self._begun, os.POSIX_FADV_DONTNEED)
            self._begun = self._end
