"""What a manifest says of a sharded checkpoint: tensors, their chunks in files, and what they belong to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from lightning_hybrid.functional.boxes import Box

FORMAT = 1  # of the file; later ones are refused


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor in a file.

    Attributes:
        box: Where it lies in the whole.
        file: Name in the data folder.
        offset: First byte of its elements, which lie there in memory order.
        crc32: Of them.
    """

    box: Box
    file: str
    offset: int
    crc32: int


@dataclass(frozen=True)
class Entry:
    """A tensor: its shape, its type as torch names it ("float32"), and its chunks."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint's folder holds.

    Attributes:
        data: Name of the data folder.
        tensors: By name; second names of tied ones are in `tied` only.
        layout: Sizes of the axes that wrote it, for people.
        epoch: Of training.
        global_step: Steps of the optimizers.
        tied: First name of each second name.
        files: (bytes, crc32) of files that hold no tensors.
    """

    data: str
    tensors: Mapping[str, Entry]
    layout: Mapping[str, int] = field(default_factory=dict)
    epoch: int = 0
    global_step: int = 0
    tied: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def to_json(self) -> str:
        """Text for the file."""
        tensors = {name: asdict(entry) for name, entry in self.tensors.items()}
        return json.dumps({"format": FORMAT, **vars(self), "tensors": tensors}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read the file's text.

        Raises:
            ValueError: If it is of a later format, or no manifest.
        """
        try:
            found = json.loads(text)
            if found.pop("format") > FORMAT:
                raise ValueError("it was written by a later version")
            tensors = {name: _entry(entry) for name, entry in found.pop("tensors").items()}
            files = {name: tuple(numbers) for name, numbers in found.pop("files").items()}
            return cls(tensors=tensors, files=files, **found)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"it is damaged ({type(error).__name__}: {error})") from error


def _entry(found: Mapping[str, Any]) -> Entry:
    boxes = [Box(*(tuple(numbers) for numbers in chunk.pop("box").values())) for chunk in found["chunks"]]
    chunks = tuple(Chunk(box=box, **chunk) for box, chunk in zip(boxes, found["chunks"], strict=True))
    return Entry(tuple(found["shape"]), found["dtype"], chunks)
