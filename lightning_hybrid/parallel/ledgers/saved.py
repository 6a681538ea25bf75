"""Watches what autograd saves for backward passes, without getting in the way of other saved-tensor hooks.

Torch asks the innermost hooks only. Ours ask those outside of them in turn, and while they are there, hooks that others
enter are watched: what counts is what those keep. An activation checkpoint keeps nothing, a compression keeps what it
has compressed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_hybrid.compat import in_backward, outer_hooks
from lightning_hybrid.functional.trees import leaves_of
from lightning_hybrid.parallel.ledgers.fates import Fate, FateObserver, Kept, Release
from lightning_hybrid.parallel.memory.hooks import PassedOn, keep


class _Watched:
    """What the graph holds in place of a saved tensor; it goes when the graph lets go of it."""

    def __init__(self, value: Any, releases: list[Release]) -> None:
        self.value, self.releases = value, releases

    def __del__(self) -> None:
        for release in self.releases:
            release()


class SavedTensors:
    """Context that tells an observer what becomes of what is saved in this thread.

    Args:
        observer: Who is told.
    """

    def __init__(self, observer: FateObserver) -> None:
        self._observer = observer
        self._hooks: saved_tensors_hooks | None = None
        self._enter: Any = None

    def __enter__(self) -> SavedTensors:
        enter, observer = saved_tensors_hooks.__enter__, self._observer
        pack, unpack = outer_hooks() or (keep, Kept.unpack)
        self._hooks = saved_tensors_hooks(_watch(pack, observer), _unwatch(unpack))
        self._hooks.__enter__()
        self._enter = enter

        def watched(hooks: saved_tensors_hooks) -> None:
            pack, unpack = hooks.pack_hook, hooks.unpack_hook
            hooks.pack_hook, hooks.unpack_hook = _watch_inner(pack, observer), _unwatch(unpack)
            try:
                enter(hooks)
            finally:
                hooks.pack_hook, hooks.unpack_hook = pack, unpack

        saved_tensors_hooks.__enter__ = watched  # type: ignore[method-assign]
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._hooks is not None
        saved_tensors_hooks.__enter__ = self._enter  # type: ignore[method-assign]
        self._hooks.__exit__(*exception)


def _watch(pack: Callable[[Tensor], Any], observer: FateObserver) -> Callable[[Tensor], _Watched]:
    """Hooks that tell the observer what becomes of what they get."""

    def packed(tensor: Tensor) -> _Watched:
        held = pack(tensor)
        return _Watched(held, [observer.announced(part, fate) for part, fate in _fates(held, tensor)])

    # autograd also calls hooks from compiled code, where Dynamo would compile them
    return torch.compiler.disable(packed)


def _watch_inner(pack: Callable[[Tensor], Any], observer: FateObserver) -> Callable[[Tensor], _Watched]:
    """The same for hooks inside. In a backward pass they are those of a checkpoint.

    It keeps what is made again apart from the graph, until it is used; that counts until it is freed.
    """
    watched = _watch(pack, observer)

    def packed(tensor: Tensor) -> _Watched:
        if not in_backward():
            return watched(tensor)
        try:
            held = pack(tensor)
        except BaseException:  # how a checkpoint ends a recomputation, with the tensor kept
            observer.announced(tensor, "kept")
            raise
        fates = _fates(held, tensor)
        releases = [(fate, observer.announced(part, fate)) for part, fate in fates]
        return _Watched(held, [release for fate, release in releases if fate != "kept"])

    return torch.compiler.disable(packed)


def _unwatch(unpack: Callable[[Any], Tensor]) -> Callable[[_Watched], Tensor]:
    return torch.compiler.disable(lambda watched: unpack(watched.value))


def _fates(held: Any, tensor: Tensor) -> list[tuple[Tensor, Fate]]:
    """What becomes of a tensor of which hooks hold something.

    Hooks that pass a tensor on show it a second time, which is the same: its storage counts.
    """
    while isinstance(held, _Watched | PassedOn):
        held = held.value
    if isinstance(held, Kept):
        return [(held.tensor, "kept")]
    if hasattr(held, "unpack"):
        return []  # by hooks of ours, which announce
    tensors = [leaf for leaf in leaves_of(held) if isinstance(leaf, Tensor)]
    if not tensors:
        return [(tensor, "recomputed")]
    return [(part, "kept" if part.device == tensor.device else "offloaded") for part in tensors]
