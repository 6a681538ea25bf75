"""Checkpoints of a run: files or folders, written at once or in the background, and read by every rank in part."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_hybrid.parallel.checkpoint import manifest as folders
from lightning_hybrid.parallel.checkpoint.background import Background, HostCopies, copy_of_objects
from lightning_hybrid.parallel.checkpoint.entries import Manifest
from lightning_hybrid.parallel.checkpoint.parts import Parts
from lightning_hybrid.parallel.checkpoint.reading import FolderReader
from lightning_hybrid.parallel.checkpoint.sharded import save_sharded
from lightning_hybrid.parallel.checkpoint.states import MODEL
from lightning_hybrid.parallel.checkpoint.stored import StoredOptimizer, StoredState
from lightning_hybrid.parallel.checkpoint.stream import stream_parts, to_checkpoint, to_memory
from lightning_hybrid.strategies.assembly import STORED, Assembly
from lightning_hybrid.strategies.collecting import Collected
from lightning_hybrid.strategies.resuming import ENTRY
from lightning_hybrid.strategies.windows import kept_window

READER = "lightning_hybrid_reader"  # entry of a checkpoint that was loaded from a folder: reads its tensors


class Checkpoints:
    """What a strategy needs to save and load.

    Args:
        timeout: Longest wait of a collective.
        background: Training goes on while a folder is written.

    Attributes:
        in_background: Training goes on while a checkpoint is written.
        is_dumping: Lightning collects what a checkpoint is going to hold.
    """

    def __init__(self, timeout: timedelta | None, *, background: bool) -> None:
        self._timeout, self.in_background = timeout, background
        self._background, self._copies = Background(), HostCopies()
        self._group: dist.ProcessGroup | None = None
        self._unsettled: set[str] = set()  # paths that are being written, or removed
        self._watched: list[Any] = []
        self._goes_on = False  # from `watch` to `end`: on_fit_end and teardown come later, when nobody waits any more
        self.is_dumping = False

    @contextmanager
    def dumping(self) -> Iterator[None]:
        """Context in which Lightning collects a checkpoint."""
        self.is_dumping = True
        try:
            yield
        finally:
            self.is_dumping = False

    def save_folder(self, assembly: Assembly, collected: Collected, path: Any, *, wait: bool) -> None:
        """Write a checkpoint as a folder; every rank calls it.

        Args:
            assembly: What runs the model.
            collected: The checkpoint.
            path: The folder.
            wait: Return when it is complete.
        """
        _refuse_remote(path)
        rest = collected.rest
        about = Manifest(
            "",
            {},
            layout=assembly.layout(),
            epoch=rest.get("epoch", 0),
            global_step=rest.get("global_step", 0),
            tied={MODEL + name: MODEL + first for name, first in collected.tied.items()},
        )

        def write(saved: Collected, group: dist.ProcessGroup | None) -> None:
            save_sharded(path, saved.parts, saved.rest, about, group)

        self._run(write, path, assembly, collected, wait=wait)

    def save_file(self, assembly: Assembly, collected: Collected, path: Any, *, wait: bool) -> None:
        """Write a checkpoint as one file, which no rank holds in memory; every rank calls it.

        Args:
            assembly: What runs the model.
            collected: The checkpoint.
            path: The file.
            wait: Return when it is complete.
        """

        def write(saved: Collected, group: dist.ProcessGroup | None) -> None:
            stream_parts(saved.parts, group, to_checkpoint(path, saved.filled))

        self._run(write, path, assembly, collected, wait=wait)

    def in_memory(self, collected: Collected) -> dict[str, Any]:
        """The whole checkpoint in the memory of world rank 0; every rank calls it."""
        found = self._gathered(collected.parts)
        return collected.filled(found) if dist.get_rank() == 0 else {}

    def add_window(self, assembly: Assembly, checkpoint: dict[str, Any]) -> None:
        """Complete a checkpoint of whole tensors by the window that it is saved in; every rank calls it."""
        parts, numbers = kept_window(assembly.engine, assembly.runner.window)
        if numbers:
            entry = checkpoint.get(ENTRY, {})
            checkpoint[ENTRY] = {**entry, "window": numbers, "gradients": self._gathered(parts)}

    def _gathered(self, parts: Parts) -> dict[str, Tensor]:
        """All ranks' parts in the memory of world rank 0."""
        self._background.wait()
        found: dict[str, Tensor] = {}
        stream_parts(parts, self._host_group(), to_memory(found))
        return found

    def _run(
        self,
        write: Callable[[Collected, dist.ProcessGroup | None], None],
        path: Any,
        assembly: Assembly,
        collected: Collected,
        *,
        wait: bool,
    ) -> None:
        """Write now, or copies in the background."""
        self._background.wait()
        self._unsettled = {os.path.abspath(path)}
        group = self._host_group()
        if wait or not (self.in_background and self._goes_on):
            write(collected, group)
            return
        rest = collected.rest if dist.get_rank() > 0 else copy_of_objects(collected.rest)
        copies = replace(collected, parts=self._copies.take(collected.parts), rest=rest)
        device = assembly.engine.mesh.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._background.start(lambda: write(copies, group))

    def remove(self, path: Any, otherwise: Callable[[], None]) -> None:
        """Remove a checkpoint, but not before the one that is being written is complete.

        Args:
            path: The checkpoint; a link is removed as such.
            otherwise: Removes what is no folder of ours.
        """

        def remove() -> None:
            if "://" in str(path):
                otherwise()
            elif Path(path).is_symlink():
                Path(path).unlink()
            elif (Path(path) / folders.FILE).exists():
                folders.remove(Path(path))
            else:
                otherwise()

        self._unsettled.add(os.path.abspath(path))
        self._background.then(remove)

    def watch(self, trainer: Trainer) -> None:
        """Let callbacks that look whether a path is free wait for what is still being written or removed there."""
        self._goes_on = True
        for callback in trainer.checkpoint_callbacks if self.in_background else ():
            if isinstance(callback, ModelCheckpoint):
                vars(callback)["file_exists"] = partial(self._exists, callback)
                self._watched.append(callback)

    def _exists(self, callback: ModelCheckpoint, path: Any, trainer: Trainer) -> bool:
        if os.path.abspath(path) in self._unsettled:
            self._background.wait()
        return type(callback).file_exists(callback, path, trainer)

    @property
    def has_failed(self) -> bool:
        """Whether a save in the background has failed; `wait` raises its error."""
        return self._background.has_failed

    def wait(self) -> None:
        """Wait until everything is written, and raise what went wrong."""
        self._background.wait()

    def end(self, error: BaseException | None) -> None:
        """Wait at the end of a run, which may have failed for another reason."""
        try:
            self._background.wait()
        except Exception as late:
            if error is None:
                raise
            rank_zero_warn(f"A checkpoint was not saved either: {late}")
        finally:
            self._goes_on = False
            self._background.end()
            for callback in self._watched:
                vars(callback).pop("file_exists", None)
            self._watched = []

    def _host_group(self) -> dist.ProcessGroup | None:
        """A group that a thread may use while training communicates, in host memory."""
        if self._group is None and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout, group_desc="checkpoint")
        return self._group


def load_folder(path: Any, *, weights_only: bool | None) -> dict[str, Any]:
    """Read a folder as Lightning expects a checkpoint, with a state of which tensors are read when they are needed."""
    reader = FolderReader(path)
    checkpoint = reader.training(weights_only=weights_only)
    tied = {key.removeprefix(MODEL): first.removeprefix(MODEL) for key, first in reader.manifest.tied.items()}
    checkpoint["state_dict"] = StoredState(reader, tied, checkpoint["state_dict"])
    checkpoint[READER] = reader
    states = checkpoint.get("optimizer_states")
    if states is not None:
        checkpoint[STORED] = [StoredOptimizer(reader, i, saved["state"]) for i, saved in enumerate(states)]
    return checkpoint


def refuse_links(trainer: Trainer) -> None:
    """Refuse a link to a checkpoint that is not complete when the link is made.

    Raises:
        ValueError: Naming the keyword.
    """
    for callback in trainer.checkpoint_callbacks:
        if getattr(callback, "save_last", None) == "link":
            raise ValueError(
                "ModelCheckpoint(save_last='link') with async_save=True would link to a checkpoint that is still being "
                "written. Set save_last=True, or async_save=False."
            )


def refuse_remote_folders(trainer: Trainer) -> None:
    """Refuse callbacks that would save folders where there are none.

    Raises:
        ValueError: Naming the path.
    """
    for callback in trainer.checkpoint_callbacks:
        _refuse_remote(getattr(callback, "dirpath", None) or trainer.default_root_dir)


def _refuse_remote(path: Any) -> None:
    if "://" in str(path):
        raise ValueError(
            f"state_dict_type='sharded' writes folders of a file system that all ranks share, got {path}. Give a "
            "path without a protocol, or set state_dict_type='full'."
        )
