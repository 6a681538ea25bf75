"""The chunks of a sharded folder read in small parts, for commands that need little memory and no process group."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lightning_hybrid.functional.boxes import Box
from lightning_hybrid.parallel.checkpoint.entries import Chunk, Entry
from lightning_hybrid.parallel.checkpoint.hollow import BLOCK, memory_of
from lightning_hybrid.parallel.checkpoint.reading import read_into
from lightning_hybrid.parallel.checkpoint.stream_plan import check_cover


def read_in_parts(folder: Path, name: str, entry: Entry) -> Iterator[tuple[Box, Tensor]]:
    """All of a tensor, as boxes of it with their elements, in 16 MiB of memory that is used again for the next.

    Args:
        folder: The data folder.
        name: The tensor's, for errors.
        entry: What is stored of it.

    Raises:
        RuntimeError: Naming the tensor and the file, if something is missing or damaged; what came before is not to be
            used then.
    """
    try:
        check_cover(name, entry.shape, {chunk.box: 0 for chunk in entry.chunks if chunk.box.numel})
    except ValueError as error:
        raise RuntimeError(f"The chunks of {name} in {folder} are not the whole tensor: {error}") from error
    for chunk in (chunk for chunk in entry.chunks if chunk.box.numel):
        path = folder / chunk.file
        try:
            yield from _parts(path, chunk, entry.torch_dtype)
        except (OSError, ValueError) as error:
            words = "the file is missing" if isinstance(error, FileNotFoundError) else f"{error}"
            raise RuntimeError(f"{name} cannot be read from {path}: {words}") from error


def _parts(path: Path, chunk: Chunk, dtype: torch.dtype) -> Iterator[tuple[Box, Tensor]]:
    crc32, offset = 0, chunk.offset
    buffer = torch.empty(min(BLOCK, chunk.box.numel * dtype.itemsize), dtype=torch.uint8)
    with path.open("rb", buffering=0) as file:
        for box in chunk.box.cut(BLOCK // dtype.itemsize):
            data = buffer[: box.numel * dtype.itemsize].view(dtype).view(box.sizes)
            read_into(file, offset, data)
            crc32, offset = zlib.crc32(memory_of(data), crc32), offset + data.nbytes
            yield box, data
    if crc32 != chunk.crc32:
        raise ValueError("its bytes are not those that were written: the checksum differs")
