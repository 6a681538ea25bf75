"""Watches what autograd saves for backward passes, without getting in the way of other saved-tensor hooks.

Torch asks the innermost hooks only. Ours are outermost, and while they are there, hooks that others enter are watched:
what counts is what those keep. An activation checkpoint keeps nothing, a compression keeps what it has compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_hybrid.compat import in_backward, version
from lightning_hybrid.functional.trees import leaves_of
from lightning_hybrid.parallel.ledgers.live import Release


class Observer(Protocol):
    """Who wants to know."""

    def saved(self, tensors: Sequence[Tensor]) -> list[Release]:
        """Tensors that a graph now holds; it calls what is returned when it lets go of them."""

    def recomputed(self, tensors: Sequence[Tensor]) -> None:
        """Tensors saved within a backward pass, by a checkpoint that keeps them until they are used."""


class _Kept:
    """What the graph holds in place of a saved tensor; it goes when the graph lets go of it."""

    def __init__(self, value: Any, version: int, releases: list[Release]) -> None:
        self.value, self.version, self.releases = value, version, releases

    def __del__(self) -> None:
        for release in self.releases:
            release()


class SavedTensors:
    """Context that tells an observer what is saved in this thread.

    Args:
        observer: Who is told.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        # autograd also calls hooks from compiled code, where Dynamo would compile them
        self._hooks = saved_tensors_hooks(torch.compiler.disable(self._pack), torch.compiler.disable(_unpack))
        self._enter: Any = None

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        enter, observer = saved_tensors_hooks.__enter__, self._observer
        self._enter = enter

        def watched(hooks: saved_tensors_hooks) -> None:
            pack, unpack = hooks.pack_hook, hooks.unpack_hook
            hooks.pack_hook, hooks.unpack_hook = _watch(pack, observer), lambda kept: unpack(kept.value)
            try:
                enter(hooks)
            finally:
                hooks.pack_hook, hooks.unpack_hook = pack, unpack

        saved_tensors_hooks.__enter__ = watched  # type: ignore[method-assign]
        return self

    def __exit__(self, *exception: object) -> None:
        saved_tensors_hooks.__enter__ = self._enter  # type: ignore[method-assign]
        self._hooks.__exit__(*exception)

    def _pack(self, tensor: Tensor) -> _Kept:
        return _Kept(tensor.detach(), version(tensor), self._observer.saved([tensor]))


def _unpack(kept: _Kept) -> Tensor:
    """The check that autograd makes where no hooks are."""
    tensor: Tensor = kept.value
    if version(tensor) != kept.version:
        raise RuntimeError(
            f"A tensor of shape {list(tensor.shape)} that the backward pass needs has been modified in place, "
            f"{version(tensor) - kept.version} time(s) since it was saved."
        )
    return tensor


def _watch(pack: Callable[[Tensor], Any], observer: Observer) -> Callable[[Tensor], _Kept]:
    def packed(tensor: Tensor) -> _Kept:
        try:
            held = pack(tensor)
        except BaseException:  # how a checkpoint ends a recomputation, with the tensor kept
            if in_backward():
                observer.recomputed([tensor])
            raise
        inner = held.value if isinstance(held, _Kept) else held
        # what has been moved to another device is not in this one's memory
        tensors = [t for t in leaves_of(inner) if isinstance(t, Tensor) and t.device == tensor.device]
        if in_backward():
            observer.recomputed(tensors)
            return _Kept(held, 0, [])
        return _Kept(held, 0, observer.saved(tensors))

    return torch.compiler.disable(packed)
