"""What a dry run of the user's step may change in a model, kept and put back."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import nn

from lightning_hybrid.compat import buffer_names
from lightning_hybrid.parallel.pipeline.frozen import Frozen
from lightning_hybrid.parallel.pipeline.gates import GATE
from lightning_hybrid.parallel.streams import Streams

INTERNAL = frozenset(vars(nn.Module())) - {"training"}  # nn.Module's own registries


class ModuleState:
    """Buffers and plain attributes of a module and all in it, as they are now.

    Numbers and strings are set back, lists, dicts and sets get their old items again, tensors their old values.
    Parameters are not touched.
    """

    def __init__(self, root: nn.Module) -> None:
        self._names = [(module, set(buffer_names(module))) for module in root.modules()]
        self._buffers = [
            (module, name, Frozen(getattr(module, name))) for module, names in self._names for name in sorted(names)
        ]
        self._attributes = [(module, freeze_attributes(module)) for module in root.modules()]

    def put_back(self) -> None:
        """Make them so again; any number of times."""
        for module, names in self._names:
            for name in set(buffer_names(module)) - names:
                delattr(module, name)
        for module, name, frozen in self._buffers:
            setattr(module, name, frozen.thaw())
        for module, saved in self._attributes:
            for name in plain_attributes(module):
                if name not in saved:
                    del module.__dict__[name]
            for name, frozen in saved.items():
                module.__dict__[name] = frozen.thaw()

    def changed_buffers(self, module: nn.Module) -> list[str]:
        """Buffers of the module that have another value, or are another tensor, than then."""
        return [
            name
            for other, name, frozen in self._buffers
            if other is module and (getattr(module, name) is not frozen.value or frozen.differs(getattr(module, name)))
        ]

    def changed(self, module: nn.Module) -> list[tuple[str, Any]]:
        """Plain attributes that the module has now and had not, or had with another value, then."""
        saved = next(saved for other, saved in self._attributes if other is module)
        return [
            (name, value)
            for name, value in plain_attributes(module).items()
            if name not in saved or saved[name].differs(value)
        ]


class Snapshot:
    """Context that restores buffers, plain attributes and random streams when it ends.

    Parameters and optimizers are not touched: a dry run has no backward.
    """

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self._root = root
        self._streams = Streams(device)

    def __enter__(self) -> Snapshot:
        self._streams.__enter__()
        self._state = ModuleState(self._root)
        self.changed_buffers, self.changed = self._state.changed_buffers, self._state.changed
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._state.put_back()
        self._streams.__exit__(kind, error, traceback)


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Attributes of a module that are neither parameters, buffers, modules nor nn.Module's own."""
    return {name: value for name, value in vars(module).items() if name not in INTERNAL and name != GATE}


def freeze_attributes(module: nn.Module) -> dict[str, Frozen]:
    """The state of a module's plain attributes."""
    return {name: Frozen(value) for name, value in plain_attributes(module).items()}
