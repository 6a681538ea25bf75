"""A sharded checkpoint's folder: what its manifest says, and how one complete checkpoint takes the place of another.

```text
NAME.ckpt/
  manifest.json   names the data folder, every tensor and every file; what it does not name does not belong
  data-3/         .metadata and __R_0.distcp of torch.distributed.checkpoint, training.pt
```

A new checkpoint is written beside the target and moved in. Over an old one, its data folder is moved in first, and then
the manifest is replaced, which is one atomic step; the old data folder goes last, and all ranks remove their share of
it, for that takes a fifth of the time of writing. So whatever is cut short, the folder
is one complete checkpoint, or has a hidden name.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_hybrid.parallel.checkpoint.entries import Manifest

FILE, TRAINING, DATA = "manifest.json", "training.pt", "data-"
PARTIAL, REMOVED, REPLACED = "partial", "removed", "replaced"  # states of hidden names
META, FSDP = ".metadata", "meta.pt"  # files of torch.distributed.checkpoint, and of Lightning beside them


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest of a checkpoint's folder.

    Raises:
        FileNotFoundError: If there is nothing.
        RuntimeError: If it is no complete checkpoint of ours.
    """
    folder = Path(path)
    if not folder.exists():
        raise FileNotFoundError(f"There is no checkpoint at {folder}.")
    refuse_unfinished(folder)
    _refuse_others(folder)
    try:
        manifest = Manifest.from_json((folder / FILE).read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise RuntimeError(
            f"{folder} has no {FILE}: it is no sharded checkpoint of lightning_hybrid, or an incomplete one. Take "
            "another checkpoint."
        ) from None
    except ValueError as error:
        raise RuntimeError(f"{folder / FILE} cannot be read: {error}. Resume from another checkpoint.") from error
    if not (folder / manifest.data).is_dir():
        raise RuntimeError(f"{folder} lacks its data folder {manifest.data}. Resume from another checkpoint.")
    return manifest


def refuse_unfinished(path: Path) -> None:
    """Refuse what has a hidden name, a file or a folder.

    Raises:
        RuntimeError: If it has.
    """
    if path.name.startswith(".") and path.name.endswith((f".{PARTIAL}", f".{REMOVED}", f".{REPLACED}")):
        raise RuntimeError(f"{path} was never completed: an interrupted save has left it. Take another checkpoint.")


def _refuse_others(folder: Path) -> None:
    """Refuse folders of other software with the command that makes one file of them."""
    if (folder / FILE).exists() or not (folder / META).exists():
        return
    if (folder / FSDP).exists():
        raise RuntimeError(
            f"{folder} was written by a strategy of Lightning's own, such as FSDP. Make it one file first: python -m "
            f"lightning.pytorch.utilities.consolidate_checkpoint {folder}"
        )
    raise RuntimeError(
        f"{folder} has no {FILE}: it was written by torch.distributed.checkpoint alone. Make it one file first: "
        f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} FILE"
    )


def is_sharded(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder, and so no full file."""
    return Path(path).is_dir()


def begin(path: Path) -> Path:
    """Make the folder that a new checkpoint's data is to be written to, beside the target; one process calls it.

    Raises:
        FileExistsError: If the target is a folder with something else in it.
    """
    refuse_folders_of_others(path)
    partial = hidden(path, PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    for aside in path.parent.glob(f".*.{REMOVED}"):
        if aside.is_dir() and _is_rest(aside):
            shutil.rmtree(aside, ignore_errors=True)
    numbers = [_number(child.name) for child in path.glob(f"{DATA}*")] if path.is_dir() else []
    data = partial / f"{DATA}{max(numbers, default=0) + 1}"
    data.mkdir(parents=True)
    return data


def commit(path: Path, data: Path, manifest: Manifest) -> None:
    """Make what was written the checkpoint at `path`, in place of what is there, which `clean` removes afterwards.

    Args:
        path: The target.
        data: From `begin`, with all files written and synced.
        manifest: Of them.
    """
    partial = data.parent
    _write(partial / FILE, manifest.to_json().encode())
    sync(data)
    sync(partial)
    if (path / FILE).exists() and not path.is_symlink():
        with suppress(RuntimeError):  # of a damaged one it is not known what it names
            clean(path, read_manifest(path).data)
        data.rename(path / data.name)
        sync(path)
        (partial / FILE).replace(path / FILE)
        sync(path)
        partial.rmdir()
    else:
        put_aside(path, partial.rename)
    sync(path.parent)


def files_to_replace(path: Path) -> list[Path]:
    """Files of the checkpoint that a new one takes the place of; none if that is a link, whose target stays."""
    folders = [] if path.is_symlink() else path.glob(f"{DATA}*")
    return sorted(file for folder in folders for file in folder.iterdir())


def clean(path: Path, kept: str) -> None:
    """Remove data folders but the one that the manifest names: replaced ones, and what interrupted saves have left."""
    for child in path.glob(f"{DATA}*"):
        if child.name != kept:
            shutil.rmtree(child)


def put_file(partial: Path, path: Path) -> None:
    """Give a complete file its name, in place of a file, which is one atomic step, or of a checkpoint's folder."""
    if path.is_dir() and not path.is_symlink():
        put_aside(path, partial.rename)
    else:
        partial.replace(path)
    sync(path.parent)


def put_aside(path: Path, put: Callable[[Path], Any]) -> None:
    """Put something in the place of a file, a link, an empty folder, or a checkpoint's."""
    aside = hidden(path, REPLACED)
    discard(aside)
    if path.is_dir() and not path.is_symlink() and not (path / FILE).exists():
        path.rmdir()  # an empty one
    elif path.exists() or path.is_symlink():
        path.rename(aside)
    put(path)
    discard(aside)


def refuse_folders_of_others(path: Path) -> None:
    """Refuse to save where a folder has something else in it.

    Raises:
        FileExistsError: Naming it.
    """
    if path.is_dir() and not (path / FILE).exists() and any(path.iterdir()):
        raise FileExistsError(f"{path} is a folder that is no checkpoint. Save to another path, or remove it.")


def remove(path: Path) -> None:
    """Remove a checkpoint, so that it is never there in part."""
    aside = hidden(path, REMOVED)
    discard(aside)
    path.rename(aside)
    discard(aside)


def discard(path: Path) -> None:
    """Remove a file or a folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def hidden(path: Path, state: str) -> Path:
    """A name beside `path` that nobody takes for a checkpoint: Lightning looks for "hpc_ckpt_" anywhere in names."""
    return path.with_name(f".{path.name.replace('hpc_ckpt_', 'hpc-ckpt-')}.{state}")


def checksum(path: Path) -> tuple[int, int]:
    """Bytes and crc32 of a file."""
    content = path.read_bytes()
    return len(content), zlib.crc32(content)


def sync(folder: Path) -> None:
    """Wait until a folder's names are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _is_rest(folder: Path) -> bool:
    """Whether a folder is what a removal has left that was cut short."""
    children = [child.name for child in folder.iterdir()]
    return all(name == FILE or name.startswith(DATA) for name in children)


def _number(name: str) -> int:
    text = name.removeprefix(DATA)
    return int(text) if text.isdigit() else 0
