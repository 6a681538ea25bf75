"""Where callbacks put their pictures, and what happens if they cannot be written."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import IO

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

Picture = bool | str | os.PathLike[str]
"""True, a path that ends in ".png" or is a folder, or False for no picture."""
OTHER_KINDS = (".jpg", ".jpeg", ".gif", ".pdf", ".svg")


def picture_path(picture: Picture, file: str, trainer: Trainer | None = None) -> str:
    """Where a picture goes: for True into the logger's folder, or without a logger into `default_root_dir`.

    Args:
        picture: What the user has asked for.
        file: The file's name in a folder.
        trainer: All its ranks ask together; None for the current folder.

    Returns:
        A path, or "" for none.

    Raises:
        ValueError: If it is something else, or a file of another kind.
    """
    if picture is False:
        return ""
    if isinstance(picture, str | os.PathLike):
        path = os.fspath(picture)
        if path.lower().endswith(OTHER_KINDS):
            raise ValueError(f'picture={path!r} must end in ".png", which pictures are, or be a folder.')
        return path if path.endswith(".png") else os.path.join(path, file)
    if picture is not True:
        raise ValueError(f'picture={picture!r} must be True, False, or a path that ends in ".png" or is a folder.')
    return os.path.join(trainer.log_dir or trainer.default_root_dir if trainer is not None else "", file)


def write_picture(path: str, draw: Callable[[IO[bytes]], None], name: str) -> None:
    """Write what `draw` draws; if that fails, warn in the name of a callback with an argument `picture`."""
    try:
        picture = io.BytesIO()
        draw(picture)
        files = get_filesystem(path)
        files.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with files.open(path, "wb") as file:
            file.write(picture.getvalue())
    except Exception as error:  # whatever it is, the run and what has ended it count more than a picture
        rank_zero_warn(f"{name} could not write {path}: {error}. Give it another path as `picture`.")
