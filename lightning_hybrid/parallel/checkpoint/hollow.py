"""Files written with room for tensors, which is filled in as their parts arrive, in any order.

So a process writes a file that is larger than its memory. The file has a hidden name until it is complete.
"""

from __future__ import annotations

import ctypes
import os
import zlib
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_hybrid.functional.boxes import Box
from lightning_hybrid.parallel.checkpoint.manifest import PARTIAL, hidden, put_file, refuse_folders_of_others

BLOCK = 2**24  # bytes that are read or written at once


@dataclass
class Hole:
    """Room for a tensor's elements.

    Attributes:
        offset: Its first byte in the file.
        nbytes: Its length.
        written: Bytes that were filled in.
        crc32: Of those, as long as they came in order; else None.
    """

    offset: int
    nbytes: int
    written: int = 0
    crc32: int | None = 0


class Hollow:
    """A file of which some holes are still to be filled; it gets its name when it is closed.

    As a context manager it closes the file, or removes it if there was an error.

    Args:
        path: The file's.

    Raises:
        FileExistsError: If that is a folder with something else than a checkpoint in it.

    Attributes:
        path: The file's.
        file: What is written, under a hidden name.
        holes: Room for tensors, which the formats make.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        refuse_folders_of_others(self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._partial = hidden(self.path, PARTIAL)
        self.file = self._partial.open("w+b")  # and not "x": what a killed process has left is in nobody's way
        self.holes: dict[Hashable, Hole] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def fill(self, key: Hashable, shape: torch.Size | tuple[int, ...], box: Box, data: Tensor) -> None:
        """Write a part of a tensor.

        Args:
            key: The hole's.
            shape: The whole's.
            box: Which part.
            data: Its elements, on any device, of the box's sizes and of the tensor's type.

        Raises:
            OSError: If the disk is full.
        """
        hole = self.holes[key]
        for start, run in box.runs(shape):
            part = byte_view(run.within(box).view(data))
            self._write(hole, start * data.element_size(), memory_of(part))

    def close(self) -> None:
        """Wait until everything is on the disk and give the file its name.

        Raises:
            RuntimeError: If some tensor was not written; the file is removed.
        """
        try:
            missing = sum(hole.nbytes - hole.written for hole in self.holes.values())
            if missing:
                raise RuntimeError(f"{missing} bytes of {self.path} were never written; the file is incomplete.")
            self.seal()
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            put_file(self._partial, self.path)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove what was written; what was at the path before is still there."""
        self.file.close()
        self._partial.unlink(missing_ok=True)

    def seal(self) -> None:
        """Write what depends on the elements."""

    def checksum(self, hole: Hole) -> int:
        """Of a hole that is full; read back if its parts came in another order than they lie in."""
        if hole.crc32 is None:
            hole.crc32 = 0
            for start in range(0, hole.nbytes, BLOCK):
                content = os.pread(self.file.fileno(), min(BLOCK, hole.nbytes - start), hole.offset + start)
                hole.crc32 = zlib.crc32(content, hole.crc32)
        return hole.crc32

    def _write(self, hole: Hole, start: int, content: memoryview) -> None:
        in_order = start == hole.written and hole.crc32 is not None
        hole.crc32 = zlib.crc32(content, hole.crc32 or 0) if in_order else None
        hole.written += len(content)
        write_at(self.file.fileno(), hole.offset + start, content)


def write_at(handle: int, offset: int, content: memoryview) -> None:
    """Write all of the content; one call of the system may write less."""
    while content:
        count = os.pwrite(handle, content[: 2**30], offset)
        content, offset = content[count:], offset + count


def byte_view(tensor: Tensor) -> Tensor:
    """A tensor's elements in host memory and in order, as bytes; a copy only where it must be one."""
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8)


def crc32(tensor: Tensor) -> int:
    """Checksum of a tensor's elements in memory order; it must be in host memory."""
    flat = tensor.detach().contiguous()
    return zlib.crc32(memory_of(flat)) if flat.nbytes else 0


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, as long as the tensor lives.

    Not through numpy, which would make the memory of a shard unfit to be freed while its parameter is whole.
    """
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
