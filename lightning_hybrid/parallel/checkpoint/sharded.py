"""Sharded checkpoints: all ranks write a folder through `torch.distributed.checkpoint`; `reading.py` reads it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from lightning_hybrid.compat import place_in_file
from lightning_hybrid.functional.boxes import Box
from lightning_hybrid.parallel.checkpoint import manifest as folders
from lightning_hybrid.parallel.checkpoint.entries import Chunk, Entry, Manifest
from lightning_hybrid.parallel.checkpoint.frames import FrameWriter, Written
from lightning_hybrid.parallel.checkpoint.parts import Parts
from lightning_hybrid.parallel.checkpoint.planner import PartsSavePlanner, key_of


@dataclass(frozen=True)
class Checked(WriteResult):
    """What was written of one chunk: its checksum, and the first byte of its elements in the file."""

    crc32: int = 0
    begin: int = 0


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
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        done: Future[list[WriteResult]] = Future()
        with closing(FrameWriter(self._folder / name)) as file:
            done.set_result([_written(item, file.write(planner.resolve_data(item)), name) for item in plan.items])
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
            chunk = Chunk(Box(offsets, tuple(size)), result.storage_data.relative_path, result.begin, result.crc32)
            chunks.setdefault(name, []).append(chunk)
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


def _written(item: WriteItem, written: Written, file: str) -> Checked:
    place = place_in_file(file, written.offset, written.nbytes)
    return Checked(item.index, written.nbytes, place, written.crc32, written.begin)


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
        ValueError: If the path cannot be one.
    """
    target = Path(path)
    rank = dist.get_rank(group)
    data, replaced = _begin(target, group)

    def complete(tensors: dict[str, Entry]) -> None:
        with (data / folders.TRAINING).open("wb") as file:
            torch.save(dict(training), file)
            file.flush()
            os.fsync(file.fileno())
        files = {name: folders.checksum(data / name) for name in (folders.TRAINING, folders.META)}
        folders.commit(target, data, replace(about, data=data.name, tensors=tensors, files=files))

    try:
        save({}, storage_writer=Writer(data, complete), planner=PartsSavePlanner(parts), process_group=group)
    except CheckpointException as error:
        if rank == 0:
            folders.discard(data.parent)
        failures = "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in error.failures.items())
        raise OSError(f"The checkpoint {target} was not saved: {failures}. What was there before still is.") from error
    _remove(replaced, group)
    if rank == 0:
        with suppress(OSError):
            folders.clean(target, data.name)


def _begin(target: Path, group: dist.ProcessGroup | None) -> tuple[Path, list[Path]]:
    """The folder to write to, and the files that go when it is complete."""
    box: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            box = [(folders.begin(target), folders.files_to_replace(target))]
        except (OSError, ValueError) as error:  # a name that cannot be one is a ValueError
            box = [error]
    dist.broadcast_object_list(box, group=group, group_src=0)
    if isinstance(box[0], Exception):
        raise box[0]
    found: tuple[Path, list[Path]] = box[0]
    return found


def _remove(files: list[Path], group: dist.ProcessGroup | None) -> None:
    """Remove files that belong to no checkpoint any more, each rank its share; what is left, the next save removes."""
    if files:
        for file in files[dist.get_rank(group) :: dist.get_world_size(group)]:
            with suppress(OSError):
                file.unlink()
        dist.barrier(group)
