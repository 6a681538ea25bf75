"""Sharded checkpoints: all ranks write a folder through `torch.distributed.checkpoint`, and any process reads it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from lightning_hybrid.functional.boxes import Box
from lightning_hybrid.parallel.checkpoint import manifest as folders
from lightning_hybrid.parallel.checkpoint.manifest import Chunk, Entry, Manifest
from lightning_hybrid.parallel.checkpoint.parts import Part, Parts, Piece
from lightning_hybrid.parallel.checkpoint.planners import PartLoadPlanner, PartsSavePlanner, key_of, stored_data

TRAINING = "training.pt"


@dataclass(frozen=True)
class Checked(WriteResult):
    """What was written of one chunk, with its checksum."""

    crc32: int = 0


class Writer(FileSystemWriter):
    """Writes chunks with checksums; the first rank then completes the folder.

    Args:
        folder: The data folder.
        complete: Called on the first rank with all tensors.
    """

    def __init__(self, folder: Path, complete: Callable[[dict[str, Entry]], None]) -> None:
        super().__init__(folder)
        self._folder, self._complete = folder, complete

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        assert isinstance(planner, PartsSavePlanner)
        written = super().write_data(plan, planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result([Checked(**vars(r), crc32=planner.checksums[key_of(r.index)]) for r in written])
        return done

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        chunks: dict[str, list[Chunk]] = {}
        for result in (result for of_rank in results for result in of_rank):
            assert isinstance(result, Checked)
            name, offsets = key_of(result.index)
            stored = metadata.state_dict_metadata[name]
            size = next(c.sizes for c in stored.chunks if tuple(c.offsets) == offsets)  # type: ignore[union-attr]
            place = result.storage_data
            box = Box(offsets, tuple(size))
            chunks.setdefault(name, []).append(
                Chunk(box, place.relative_path, place.offset, place.length, result.crc32)
            )
        for file in {chunk.file for of_tensor in chunks.values() for chunk in of_tensor}:
            if not (self._folder / file).exists():
                raise FileNotFoundError(f"{self._folder / file} was written by another rank and is not seen here")
        self._complete(
            {
                name: Entry(
                    tuple(stored.size),  # type: ignore[union-attr]
                    str(stored.properties.dtype).removeprefix("torch."),  # type: ignore[union-attr]
                    tuple(sorted(chunks[name], key=lambda chunk: chunk.box)),
                )
                for name, stored in metadata.state_dict_metadata.items()
            }
        )


def save_sharded(
    path: str | os.PathLike[str],
    parts: Parts,
    training: Mapping[str, Any],
    about: Manifest,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint; every rank of the group calls it, and sees the error of any.

    Args:
        path: The folder, on a file system that all ranks share.
        parts: What this rank has of each tensor.
        training: All else, on the first rank.
        about: Layout, progress and tied names, on the first rank.
        group: Of host memory; None for the default group.

    Raises:
        OSError: If a rank cannot write, with its own message; what was at `path` is still there.
    """
    target = Path(path)
    rank = dist.get_rank(group)
    box: list[Any] = [None]
    if rank == 0:
        try:
            box = [folders.begin(target)]
        except OSError as error:
            box = [error]
    dist.broadcast_object_list(box, group=group, group_src=0)
    if isinstance(box[0], OSError):
        raise box[0]
    data: Path = box[0]

    def complete(tensors: dict[str, Entry]) -> None:
        with (data / TRAINING).open("wb") as file:
            torch.save(dict(training), file)
            file.flush()
            os.fsync(file.fileno())
        files = {name: folders.checksum(data / name) for name in (TRAINING, ".metadata")}
        folders.commit(target, data, replace(about, data=data.name, tensors=tensors, files=files))

    try:
        save({}, storage_writer=Writer(data, complete), planner=PartsSavePlanner(parts), process_group=group)
    except CheckpointException as error:
        if rank == 0:
            folders.discard(data.parent)
        failures = "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in error.failures.items())
        raise OSError(f"The checkpoint {target} was not saved: {failures}. What was there before still is.") from error


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
        self._reader = FileSystemReader(self._folder)
        metadata = Metadata({}, storage_data=stored_data(self.manifest.tensors))
        self._reader.set_up_storage_reader(metadata, is_coordinator=False)

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
            planner = PartLoadPlanner(self.manifest.tied.get(name, name), entry, part)
            if planner.missing():
                raise RuntimeError(f"{self.path} lacks {planner.missing()} elements of {name}: a shard is missing.")
            for item in planner.create_local_plan().items:
                try:
                    self._reader.read_data(LoadPlan([item]), planner)
                except Exception as error:
                    raise RuntimeError(
                        f"{name} cannot be read from {self._folder / planner.file_of(item)}: {type(error).__name__}: "
                        f"{error}. The checkpoint is damaged; resume from another one."
                    ) from error

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
        path = self._folder / TRAINING
        found = folders.checksum(path) if path.exists() else None
        if found != self.manifest.files.get(TRAINING):
            raise RuntimeError(f"{path} is missing or damaged; resume from another checkpoint.")
        training: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=weights_only)
        return training

    def _entry(self, name: str) -> Entry:
        entry = self.manifest.tensors.get(self.manifest.tied.get(name, name))
        if entry is None:
            raise RuntimeError(f"{self.path} has no {name}. Load the checkpoint of the same model.")
        return entry
