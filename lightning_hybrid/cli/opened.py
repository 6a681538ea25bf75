"""A checkpoint as the tools see it: names, shapes, and elements in small parts, whatever it is stored as."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hybrid.functional.boxes import Box
from lightning_hybrid.functional.trees import leaves_of
from lightning_hybrid.parallel.checkpoint import manifest as folders
from lightning_hybrid.parallel.checkpoint.chunks import read_in_parts
from lightning_hybrid.parallel.checkpoint.hollow import BLOCK
from lightning_hybrid.parallel.checkpoint.reading import FolderReader
from lightning_hybrid.parallel.checkpoint.states import MODEL, OPTIMIZER
from lightning_hybrid.parallel.checkpoint.stream_plan import Spec
from lightning_hybrid.strategies.resuming import optimizer_names


@dataclass(frozen=True)
class About:
    """What a checkpoint is, in words and numbers.

    Attributes:
        kind: What it is stored as.
        layout: Axes that wrote it, where that is known.
        epoch: Of training, where that is known.
        global_step: Steps of the optimizers, where that is known.
    """

    kind: str
    layout: Mapping[str, int] = field(default_factory=dict)
    epoch: int | None = None
    global_step: int | None = None


class Opened(Protocol):
    """A checkpoint that was found to be complete.

    Attributes:
        path: Where it is.
        about: What it is.
        tensors: Shape and type of each, under `model.` and `optimizer.`, without the second names of tied ones.
        tied: First name of each second one.
    """

    path: Path
    about: About
    tensors: Mapping[str, Spec]
    tied: Mapping[str, str]

    def chunks(self, name: str) -> int:
        """In how many pieces a tensor is stored."""

    def parts(self, name: str) -> Iterator[tuple[Box, Tensor]]:
        """A tensor's elements in small parts; raises a RuntimeError that names tensor and file."""

    def training(self) -> dict[str, Any]:
        """The checkpoint without tensors of the model and of optimizer states."""


class OpenedFolder(Opened):
    """A sharded checkpoint of this package.

    Args:
        path: The folder.
        trust: Load objects of any class, which may run code.
    """

    def __init__(self, path: Path, *, trust: bool) -> None:
        self._reader, self._trust = FolderReader(path), trust
        manifest = self._reader.manifest
        self.path, self.folder, self.manifest = path, path / manifest.data, manifest
        self.about = About(f"sharded, in {manifest.data}", manifest.layout, manifest.epoch, manifest.global_step)
        self.tensors = {name: (entry.shape, entry.torch_dtype) for name, entry in manifest.tensors.items()}
        self.tied = {name: first for name, first in manifest.tied.items() if first in self.tensors}

    @override
    def chunks(self, name: str) -> int:
        return len(self.manifest.tensors[name].chunks)

    @override
    def parts(self, name: str) -> Iterator[tuple[Box, Tensor]]:
        return read_in_parts(self.folder, name, self.manifest.tensors[name])

    @override
    def training(self) -> dict[str, Any]:
        with _readable(self.path, self._trust):
            return self._reader.training(weights_only=not self._trust)


class OpenedFile(Opened):
    """A checkpoint in one file, of any strategy; it is mapped, so that its pages take no memory of their own.

    Args:
        path: The file.
        trust: Load objects of any class, which may run code.
    """

    def __init__(self, path: Path, *, trust: bool) -> None:
        self.path = path
        with _readable(path, trust):
            self.checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=not trust)
        state = self.checkpoint.get("state_dict") if isinstance(self.checkpoint, dict) else None
        if not isinstance(state, Mapping):
            raise RuntimeError(f"{path} has no state_dict: it is no checkpoint of a LightningModule.")
        self.about = About("one file", {}, self.checkpoint.get("epoch"), self.checkpoint.get("global_step"))
        self._values = {MODEL + key: value for key, value in state.items() if isinstance(value, Tensor)}
        first: dict[Any, str] = {}
        self.tied = {n: first[k] for n, v in self._values.items() if first.setdefault(k := _place(v), n) != n}
        self._values |= self._optimizers()
        self.tensors = {n: (tuple(v.shape), v.dtype) for n, v in self._values.items() if n not in self.tied}

    @override
    def chunks(self, name: str) -> int:
        return 1

    @override
    def parts(self, name: str) -> Iterator[tuple[Box, Tensor]]:
        value = self._values[name]
        return ((box, box.view(value)) for box in Box.of(value.shape).cut(BLOCK // value.element_size()))

    @override
    def training(self) -> dict[str, Any]:
        others = {k: v for k, v in self.checkpoint["state_dict"].items() if not isinstance(v, Tensor)}
        return {**self.checkpoint, "state_dict": others}

    def names_of(self, record: str) -> list[str]:
        """The tensors whose elements a record of the archive holds.

        The file is mapped as it is, so that storages lie in memory as their records lie in it.
        """
        with zipfile.ZipFile(self.path) as archive:
            records = sorted((i.header_offset, i.filename) for i in archive.infolist() if i.file_size)
        data = [name for _, name in records if name.rpartition("/")[0].endswith("/data")]
        tensors = (leaf for leaf in leaves_of(self.checkpoint) if isinstance(leaf, Tensor))
        storages = [tensor.untyped_storage() for tensor in tensors]
        places = sorted({storage.data_ptr() for storage in storages if storage.nbytes()})
        if len(places) != len(data) or record not in data:
            return []
        place = places[data.index(record)]
        return [name for name, value in self._values.items() if value.untyped_storage().data_ptr() == place]

    def _optimizers(self) -> dict[str, Tensor]:
        saved = self.checkpoint.get("optimizer_states", [])
        found: dict[str, Tensor] = {}
        for i, (optimizer, groups) in enumerate(zip(saved, optimizer_names(self.checkpoint, len(saved)), strict=True)):
            names = dict(enumerate(name for group in groups or [] for name in group))
            for number, entries in optimizer["state"].items():
                prefix = f"{OPTIMIZER}{i}.{names.get(number, number)}."
                found |= {prefix + str(entry): v for entry, v in entries.items() if isinstance(v, Tensor)}
        return found


@contextmanager
def _readable(path: Path, trust: bool) -> Iterator[None]:
    """Tell in one line why a pickle cannot be read."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:
        if isinstance(error, pickle.UnpicklingError) and not trust and "weights_only" in str(error).lower():
            found = str(error).partition("Unsupported global: ")[2].partition(" was not")[0] or "more than tensors"
            raise RuntimeError(
                f"{path} holds {found}, which is not loaded without your leave: its classes may run code. Add --trust "
                "if you know where the checkpoint comes from."
            ) from error
        first = str(error).partition("\n")[0]
        raise RuntimeError(f"{path} cannot be read: {type(error).__name__}: {first}") from error


def open_checkpoint(path: Path, *, trust: bool = False) -> OpenedFolder | OpenedFile:
    """Find out what is at a path.

    Raises:
        FileNotFoundError: If there is nothing.
        RuntimeError: If it is incomplete, damaged or another's.
    """
    if not path.exists():
        partial = folders.hidden(path, folders.PARTIAL)
        beside = f" {partial} is what an interrupted save has left." if partial.exists() else ""
        raise FileNotFoundError(f"There is no checkpoint at {path}.{beside}")
    folders.refuse_unfinished(path)
    if path.is_dir():
        return OpenedFolder(path, trust=trust)
    return OpenedFile(path, trust=trust)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same memory; unlike all others for one without elements."""
    return (tensor.data_ptr() or id(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride())
