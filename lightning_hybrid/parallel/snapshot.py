"""What a dry run of the user's step may change in a model, kept and put back."""

from __future__ import annotations

import copy
from collections import deque
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.parallel.gates import GATE, fork_random_streams

SIMPLE = (bool, int, float, str, type(None))
CONTAINERS = (list, dict, set, deque)
INTERNAL = frozenset(vars(nn.Module())) - {"training"}  # nn.Module's own registries


class Snapshot:
    """Context that restores buffers, plain attributes and random streams when it ends.

    Numbers and strings are set back, lists, dicts and sets get their old items again, tensors their old values.
    Parameters and optimizers are not touched: a dry run has no backward.
    """

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self._root = root
        self._streams = fork_random_streams(device)

    def __enter__(self) -> Snapshot:
        self._streams.__enter__()
        with torch.no_grad():
            self._buffers = [
                (module, name, buffer, buffer.clone())
                for module in self._root.modules()
                for name, buffer in module.named_buffers(recurse=False)
            ]
        self._attributes = [(module, _save(module)) for module in self._root.modules()]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with torch.no_grad():
            for module, name, buffer, value in self._buffers:
                if getattr(module, name) is not buffer:
                    setattr(module, name, buffer)
                buffer.copy_(value)
        for module, saved in self._attributes:
            _restore(module, saved)
        self._streams.__exit__(kind, error, traceback)

    def changed_buffers(self, module: nn.Module) -> list[str]:
        """Buffers of the module that have another value, or are another tensor, than when the context began."""
        return [
            name
            for other, name, buffer, value in self._buffers
            if other is module and (getattr(module, name) is not buffer or not torch.equal(buffer, value))
        ]

    def changed(self, module: nn.Module) -> list[tuple[str, Any]]:
        """Plain attributes that the module has now and had not, or had with another value, when the context began."""
        saved = next(saved for other, saved in self._attributes if other is module)
        return [
            (name, value)
            for name, value in plain_attributes(module).items()
            if name not in saved or _differs(saved[name][0], saved[name][1], value)
        ]


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Attributes of a module that are neither parameters, buffers, modules nor nn.Module's own."""
    return {name: value for name, value in vars(module).items() if name not in INTERNAL and name != GATE}


def _save(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    saved: dict[str, tuple[Any, Any]] = {}
    for name, value in plain_attributes(module).items():
        if isinstance(value, CONTAINERS):
            saved[name] = value, copy.copy(value)
        elif isinstance(value, Tensor) and 0 not in value.stride():  # an expanded tensor is a stand-in
            saved[name] = value, value.detach().clone()
        else:
            saved[name] = value, value
    return saved


def _restore(module: nn.Module, saved: dict[str, tuple[Any, Any]]) -> None:
    for name in plain_attributes(module):
        if name not in saved:
            del module.__dict__[name]
    for name, (original, value) in saved.items():
        if isinstance(original, CONTAINERS):
            _refill(original, value)
        elif original is not value:
            original = value
        module.__dict__[name] = original


def _refill(container: Any, items: Any) -> None:
    container.clear()
    if isinstance(container, list | deque):
        container.extend(items)
    else:
        container.update(items)


def _differs(original: Any, saved: Any, value: Any) -> bool:
    if value is not original:
        return not (isinstance(value, SIMPLE) and value == saved)
    if isinstance(value, CONTAINERS):
        return len(value) != len(saved) or any(a is not b for a, b in zip(value, saved, strict=True))
    return isinstance(value, Tensor) and not torch.equal(value, saved)
