"""Which checkpoint of a folder a run goes on from."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

from lightning_hybrid.parallel.checkpoint.manifest import FILE, read_manifest

SUFFIX = ".ckpt"


def latest_checkpoint(dirpath: str | os.PathLike[str]) -> str | None:
    """The newest complete checkpoint of a folder, for `trainer.fit(model, ckpt_path=latest_checkpoint(dirpath))`.

    Full ones (files) and sharded ones (folders) count, whoever has saved them there: a `ModelCheckpoint`, a signal, or
    a run that has left for more replicas. What an interrupted save has left does not. `ckpt_path="last"` of Lightning
    knows files of a `ModelCheckpoint(save_last=True)` alone.

    Args:
        dirpath: The folder, shared by all nodes; it need not exist.

    Returns:
        Its path; None if there is none, with which a fit begins anew.
    """
    folder = Path(dirpath)
    found = {path: time for path in folder.glob(f"*{SUFFIX}") if (time := _completed(path)) is not None}
    return str(max(found, key=lambda path: (found[path], path.name))) if found else None


def _completed(path: Path) -> int | None:
    """When a checkpoint was completed, in ns; None if it is none, or not complete."""
    try:
        if path.name.startswith("."):
            return None
        if path.is_dir():
            read_manifest(path)
            return (path / FILE).stat().st_mtime_ns
        return path.stat().st_mtime_ns if zipfile.is_zipfile(path) else None
    except (OSError, RuntimeError):  # removed or replaced meanwhile, or incomplete
        return None
