"""Layers around calls of modules that nobody rewrote: sequence shards, who watches, recomputation, streaming.

A module's `forward` is what they surround: hooks, those of `fully_shard` too, stay outside and run once. A compiled
module runs as one piece, so its compiled call is surrounded instead.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import partial, update_wrapper
from typing import Any, Protocol

import torch
from torch import nn

from lightning_hybrid.compat import COMPILED_CALL, is_compiled


class Order(IntEnum):
    """From the outermost layer to the innermost, in whatever order they are added."""

    REGION = 0
    NUMBER = 1
    WATCH = 2
    RECOMPUTE = 3
    STREAM = 4


class Layer(Protocol):
    """What is put around calls."""

    def __call__(self, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call; `proceed` is what is inside."""


class _Surrounded:
    """Stands for a module's forward. A copy of the module has the plain one."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner
        self.layers: dict[Order, Layer] = {}
        self.before: Callable[..., Any] | None = None  # an instance's own, if it had one
        update_wrapper(self, inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # code around the module, whose graph breaks here
            return self._call_uncompiled(*args, **kwargs)
        return self._call(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        call = self.inner
        for order in sorted(self.layers, reverse=True):
            call = partial(_enter, self.layers[order], call)
        return call(*args, **kwargs)

    _call_uncompiled: Any = torch.compiler.disable(_call)

    def __reduce__(self) -> Any:
        return _plain, (self.inner,)  # copies of the module, and pickled ones, have its own forward


def _plain(inner: Callable[..., Any]) -> Callable[..., Any]:
    return inner


def _enter(layer: Layer, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return layer(proceed, args, kwargs)


def surround(module: nn.Module, order: Order, layer: Layer) -> Callable[[], None]:
    """Put a layer around all calls of a module, also direct ones of its `forward`.

    Args:
        module: It is changed in place; its class, names, hooks and `state_dict` are not.
        order: Its place among layers; each may be taken once.
        layer: What answers calls.

    Returns:
        Takes the layer away.

    Raises:
        RuntimeError: If the place is taken.
    """
    name = COMPILED_CALL if is_compiled(module) else "forward"
    surrounded = vars(module).get(name)
    if not isinstance(surrounded, _Surrounded):
        surrounded = _Surrounded(getattr(module, name))
        surrounded.before = vars(module).get(name)
        vars(module)[name] = surrounded
    if order in surrounded.layers:
        raise RuntimeError(f"Calls of {type(module).__name__} have a layer of kind {order.name.lower()} already.")
    surrounded.layers[order] = layer
    return partial(_remove, module, name, surrounded, order)


def _remove(module: nn.Module, name: str, surrounded: _Surrounded, order: Order) -> None:
    surrounded.layers.pop(order, None)
    if surrounded.layers or vars(module).get(name) is not surrounded:
        return
    if surrounded.before is None:
        del vars(module)[name]
    else:
        vars(module)[name] = surrounded.before
