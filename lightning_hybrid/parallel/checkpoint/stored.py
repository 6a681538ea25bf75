"""States in a sharded folder, of which each rank reads what it needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.functional.boxes import Box
from lightning_hybrid.parallel.checkpoint.parts import Part, Parts, Piece
from lightning_hybrid.parallel.checkpoint.states import MODEL, OPTIMIZER, Reader, new_part
from lightning_hybrid.parallel.engine import Engine


class StoredState(MutableMapping[str, Any]):
    """A model's state of which a tensor is read when somebody asks for it; entries may be changed and deleted.

    Args:
        reader: Of the folder.
        tied: First key of each second one.
        others: What is no tensor, and what was added when it was saved.
    """

    def __init__(self, reader: Reader, tied: Mapping[str, str], others: Mapping[str, Any]) -> None:
        self._reader, self._others = reader, dict(others)
        keys = [name.removeprefix(MODEL) for name in reader.names if name.startswith(MODEL)]
        self._stored = dict.fromkeys(keys) | dict.fromkeys(key for key, first in tied.items() if first in keys)

    def __getitem__(self, key: str) -> Any:
        if key in self._others:
            return self._others[key]
        if key not in self._stored:
            raise KeyError(key)
        name = MODEL + key
        tensor = torch.empty(self._reader.shape(name), dtype=self._reader.dtype(name))
        self._reader.read({name: Part(tuple(tensor.shape), tensor.dtype, (Piece(Box.of(tensor.shape), tensor),))})
        return tensor

    def __setitem__(self, key: str, value: Any) -> None:
        self._others[key] = value

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        self._others.pop(key, None)
        self._stored.pop(key, None)

    def __contains__(self, key: object) -> bool:
        return key in self._others or key in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter([*self._stored, *(key for key in self._others if key not in self._stored)])

    def __len__(self) -> int:
        return len(self._stored.keys() | self._others.keys())

    def shape(self, key: str) -> tuple[int, ...] | None:
        """Shape of a tensor; None for anything else."""
        if key in self._others:
            value = self._others[key]
            return tuple(value.shape) if isinstance(value, Tensor) else None
        return self._reader.shape(MODEL + key)

    def part(self, engine: Engine, key: str, like: Any) -> Tensor | None:
        """What a rank holds of a tensor, without the rest of it.

        Args:
            engine: The rank's engine.
            key: State key.
            like: What the rank has there now.

        Returns:
            None if it is not in the folder, or not of that shape.
        """
        if key in self._others or not isinstance(like, Tensor):
            return None
        tensor, part = new_part(engine, key, like)
        if part.shape != self.shape(key):
            return None
        self._reader.read({MODEL + key: part})
        return tensor


class StoredOptimizer:
    """One optimizer's state in a folder.

    Args:
        reader: Of the folder.
        index: The optimizer's number.
        others: By parameter and entry, what is no tensor.
    """

    def __init__(self, reader: Reader, index: int, others: Mapping[str, Mapping[str, Any]]) -> None:
        self._reader, self._others = reader, others
        self._prefix = f"{OPTIMIZER}{index}."
        self._entries: dict[str, list[str]] = {}
        for name in (name for name in reader.names if name.startswith(self._prefix)):
            parameter, _, entry = name.removeprefix(self._prefix).rpartition(".")
            self._entries.setdefault(parameter, []).append(entry)

    def parameters(self) -> Sequence[str]:
        """Names of parameters that have a state."""
        return list(self._entries.keys() | self._others.keys())

    def part(self, engine: Engine, name: str, parameter: nn.Parameter) -> dict[str, Any] | None:
        """This rank's part of the state of one parameter; None if it has none."""
        if name not in self._entries and name not in self._others:
            return None
        state = dict(self._others.get(name, {}))
        for entry in self._entries.get(name, ()):
            stored = f"{self._prefix}{name}.{entry}"
            tensor, part = new_part(engine, name, parameter, self._reader.dtype(stored))
            if part.shape != self._reader.shape(stored):
                tensor = torch.empty(self._reader.shape(stored), dtype=self._reader.dtype(stored))
                part = Part(tuple(tensor.shape), tensor.dtype, (Piece(Box.of(tensor.shape), tensor),))
            self._reader.read({stored: part})
            state[entry] = tensor
        return state


class WholeTensors:
    """A reader of tensors that are in memory, or in a mapped file, as wholes.

    Args:
        tensors: By name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    @property
    def names(self) -> Sequence[str]:
        """Names of all tensors."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a whole tensor."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor."""
        return self._tensors[name].dtype

    @torch.no_grad()
    def read(self, parts: Parts) -> None:
        """Fill the pieces of each part."""
        for name, part in parts.items():
            for piece in part.pieces:
                piece.data.copy_(piece.box.view(self._tensors[name]))
