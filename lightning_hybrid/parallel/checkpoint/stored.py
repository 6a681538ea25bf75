"""States in a sharded folder, of which each rank reads what it needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.parallel.checkpoint.reading import FolderReader
from lightning_hybrid.parallel.checkpoint.saving import collapsed_of
from lightning_hybrid.parallel.checkpoint.states import MODEL, OPTIMIZER, new_part
from lightning_hybrid.parallel.engine import Engine


class StoredState(MutableMapping[str, Any]):
    """A model's state of which a tensor is read when somebody asks for it; entries may be changed and deleted.

    Args:
        reader: Of the folder.
        tied: First key of each second one.
        others: What is no tensor, and what was added when it was saved.
    """

    def __init__(self, reader: FolderReader, tied: Mapping[str, str], others: Mapping[str, Any]) -> None:
        self._reader, self._others = reader, dict(others)
        keys = [name.removeprefix(MODEL) for name in reader.names if name.startswith(MODEL)]
        self._stored = dict.fromkeys(keys)
        self._stored |= dict.fromkeys(key for key, first in tied.items() if first in self._stored)

    def __getitem__(self, key: str) -> Any:
        if key in self._others:
            return self._others[key]
        if key not in self._stored:
            raise KeyError(key)
        return self._reader.whole(MODEL + key)

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

    def __init__(self, reader: FolderReader, index: int, others: Mapping[str, Mapping[str, Any]]) -> None:
        self._reader, self._others = reader, others
        self._prefix = f"{OPTIMIZER}{index}."
        self._entries: dict[str, list[str]] = {}
        for name in (name for name in reader.names if name.startswith(self._prefix)):
            parameter, _, entry = name.removeprefix(self._prefix).rpartition(".")
            self._entries.setdefault(parameter, []).append(entry)

    def part(self, engine: Engine, optimizer: Optimizer, name: str, parameter: nn.Parameter) -> dict[str, Any] | None:
        """This rank's part of the state that an optimizer has for one parameter; None if it has none."""
        if name not in self._entries and name not in self._others:
            return None
        state = dict(self._others.get(name, {}))
        for entry in self._entries.get(name, ()):
            stored = f"{self._prefix}{name}.{entry}"
            collapsed = collapsed_of(engine, optimizer, name, parameter, entry)
            tensor, part = new_part(engine, name, parameter, self._reader.dtype(stored), collapsed)
            if part.shape == self._reader.shape(stored):
                self._reader.read({stored: part})
            else:  # such as a count of steps
                tensor = self._reader.whole(stored)
            state[entry] = tensor
        return state
