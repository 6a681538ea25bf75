"""Checkpoint files that exist only when they are complete."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from lightning.pytorch.plugins import TorchCheckpointIO
from typing_extensions import override

from lightning_hybrid.parallel.checkpoint.manifest import PARTIAL, hidden, put_file, refuse_folders_of_others


class WholeFiles(TorchCheckpointIO):
    """Writes beside the target and renames it.

    Lightning's own writes to the temporary folder and moves the file, which is a copy that can be cut short where the
    target is on another file system.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if storage_options is not None or "://" in str(path):
            return super().save_checkpoint(checkpoint, path, storage_options)
        target = Path(path)
        refuse_folders_of_others(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = hidden(target, PARTIAL)
        try:
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            put_file(partial, target)
        finally:
            partial.unlink(missing_ok=True)
        return None

    @override
    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        """Map a file into memory, so that each rank reads what it needs; else as Lightning does."""
        if "://" in str(path) or not os.path.exists(path):
            return super().load_checkpoint(path, map_location, weights_only)
        try:
            if is_zipfile(path):
                return dict(torch.load(path, map_location=map_location, mmap=True, weights_only=weights_only))
            return super().load_checkpoint(path, map_location, weights_only)
        except Exception as error:  # torch has many for files that were cut short, or are something else
            raise RuntimeError(
                f"{path} cannot be loaded: {type(error).__name__}: {error}. If weights_only is not the reason, it is "
                "damaged, or no checkpoint; resume from another one."
            ) from error
