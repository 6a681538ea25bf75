"""Reads sharded checkpoints, whatever layout wrote them: each chunk that is needed, once, with its checksum.

The files are those of `torch.distributed.checkpoint`, whose `FileSystemReader` reads them too. It unpickles each chunk
on its own, which takes five times as long for chunks of a megabyte (torch 2.13), and trusts the bytes. The manifest
says where the elements lie, so that nothing is unpickled here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lightning_hybrid.functional.boxes import Box
from lightning_hybrid.parallel.checkpoint import manifest as folders
from lightning_hybrid.parallel.checkpoint.entries import Chunk, Entry
from lightning_hybrid.parallel.checkpoint.hollow import crc32, memory_of
from lightning_hybrid.parallel.checkpoint.parts import Part, Parts, Piece


class FolderReader:
    """Reads a sharded checkpoint, whatever layout wrote it; one process alone, without a group.

    Args:
        path: The folder.

    Attributes:
        path: The folder.
        manifest: What it holds.

    Raises:
        FileNotFoundError: If there is none.
        RuntimeError: If it is no complete checkpoint.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.manifest = folders.read_manifest(path)
        self._folder = self.path / self.manifest.data

    @property
    def names(self) -> list[str]:
        """Names of all tensors, tied ones once."""
        return list(self.manifest.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a whole tensor."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor."""
        return self._entry(name).torch_dtype

    def read(self, parts: Parts) -> None:
        """Fill the pieces of each part, in their own type and on their own device.

        Raises:
            RuntimeError: Naming the tensor and the file, if something is missing, has another shape or was damaged.
        """
        for name, part in parts.items():
            entry = self._entry(name)
            if entry.shape != part.shape:
                raise RuntimeError(
                    f"{name} has shape {list(entry.shape)} in {self.path} and {list(part.shape)} here. Load the "
                    "checkpoint of the same model."
                )
            boxes = [(chunk, [piece for piece in part.pieces if chunk.box.meet(piece.box)]) for chunk in entry.chunks]
            missing = sum(piece.box.numel for piece in part.pieces) - sum(
                met.numel for chunk, pieces in boxes for piece in pieces if (met := chunk.box.meet(piece.box))
            )
            if missing:
                raise RuntimeError(f"{self.path} lacks {missing} elements of {name}: a shard is missing.")
            for chunk, pieces in boxes:
                if pieces and chunk.box.numel:
                    self._read_chunk(name, entry.torch_dtype, chunk, pieces)

    def _read_chunk(self, name: str, dtype: torch.dtype, chunk: Chunk, pieces: Sequence[Piece]) -> None:
        """Read all of a chunk, whose checksum is over all of it, and fill what it has of the pieces."""
        target = next((p.data for p in pieces if p.box == chunk.box and _takes_bytes(p.data, dtype)), None)
        memory = torch.empty(chunk.box.sizes, dtype=dtype) if target is None else target
        path = self._folder / chunk.file
        try:
            with path.open("rb", buffering=0) as file:
                read_into(file, chunk.offset, memory)
            if crc32(memory) != chunk.crc32:
                raise ValueError("its bytes are not those that were written: the checksum differs")
        except (OSError, ValueError) as error:
            raise RuntimeError(
                f"{name} cannot be read from {path}: {error}. The checkpoint is damaged; resume from another one."
            ) from error
        with torch.no_grad():
            for piece in (piece for piece in pieces if piece.data is not target):
                box = piece.box.meet(chunk.box)
                assert box is not None
                box.within(piece.box).view(piece.data).copy_(box.within(chunk.box).view(memory))

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor in host memory."""
        entry = self._entry(name)
        tensor = torch.empty(entry.shape, dtype=entry.torch_dtype)
        self.read({name: Part(entry.shape, tensor.dtype, (Piece(Box.of(entry.shape), tensor),))})
        return tensor

    def training(self, *, weights_only: bool | None = None) -> dict[str, Any]:
        """All that is not a tensor of the model or of an optimizer state.

        Args:
            weights_only: As in `torch.load`.

        Raises:
            RuntimeError: If the file is damaged.
        """
        path = self._folder / folders.TRAINING
        found = folders.checksum(path) if path.exists() else None
        if found != self.manifest.files.get(folders.TRAINING):
            raise RuntimeError(f"{path} is missing or damaged; resume from another checkpoint.")
        training: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=weights_only)
        return training

    def _entry(self, name: str) -> Entry:
        entry = self.manifest.tensors.get(self.manifest.tied.get(name, name))
        if entry is None:
            raise RuntimeError(f"{self.path} has no {name}. Load the checkpoint of the same model.")
        return entry


def read_into(file: BinaryIO, offset: int, tensor: Tensor) -> None:
    """Read a tensor's elements.

    Args:
        file: Unbuffered.
        offset: Of the first byte.
        tensor: Contiguous, in host memory.

    Raises:
        ValueError: If the file ends before.
    """
    memory = memory_of(tensor)
    while memory:
        count = os.preadv(file.fileno(), [memory], offset)
        if not count:
            raise ValueError(f"it ends at byte {offset}")
        memory, offset = memory[count:], offset + count


def _takes_bytes(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype == dtype and tensor.is_contiguous()
