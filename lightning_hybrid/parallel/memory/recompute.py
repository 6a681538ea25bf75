"""Which calls of modules are recomputed together, and how they are watched while costs are measured."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_hybrid.parallel.memory.calls import Layer
from lightning_hybrid.parallel.memory.frames import Contexts, Frame, Site
from lightning_hybrid.parallel.memory.inputs import Arguments


class CallObserver(Protocol):
    """Who measures."""

    def watch(
        self, position: int, arguments: Arguments, frame: Frame
    ) -> AbstractContextManager[Callable[[Tensor], object] | None]:
        """Context of a site's first run; what it gives is told each tensor that is dropped."""


class Recomputation:
    """Puts calls of modules into frames.

    Args:
        sites: The modules, in the order in which they are called.
        contexts: For selective recomputation.
        saving: Context in which kept arguments are saved.

    Attributes:
        segments: Number of each site's segment; None keeps what it saves.
        observer: Told about each call, while somebody measures.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        contexts: Contexts | None = None,
        saving: Callable[[list[Tensor]], AbstractContextManager[Any]] = lambda tensors: nullcontext(),
    ) -> None:
        self.sites, self._contexts, self._saving = list(sites), contexts, saving
        self.segments: list[int | None] = list(range(len(sites)))
        self.observer: CallObserver | None = None
        self._caches = weakref.WeakKeyDictionary[Any, set[int]]()
        self._open: Callable[[], Frame | None] = lambda: None
        self._last = -1

    def layer(self, position: int) -> Layer:
        """The layer of one site's calls."""

        def layer(proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self.call(position, proceed, args, kwargs)

        return layer

    def call(self, position: int, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a site's call."""
        if not torch.is_grad_enabled():
            return proceed(*args, **kwargs)
        segment, site = self.segments[position], self.sites[position]
        self._refuse_used_caches(position, args, kwargs)
        proceed = with_empty_caches(proceed, args, kwargs)  # those that are kept fill none either
        if segment is None:
            self._open = lambda: None
            return proceed(*args, **kwargs)
        frame = self._open() if self._last + 1 == position else None
        if frame is None or frame.segment != segment:
            frame = Frame(segment)
        arguments = Arguments(args, kwargs, frame.link, self._saving)
        self._open, self._last = weakref.ref(frame), position
        watch = nullcontext() if self.observer is None else self.observer.watch(position, arguments, frame)
        with watch as seen:
            return frame.run(
                site,
                arguments,
                lambda: proceed(*args, **kwargs),
                proceed,
                self._contexts,
                seen if seen is not None else _ignore,
            )

    def _refuse_used_caches(self, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A step that goes on from a cache would find nothing in it.

        Raises:
            RuntimeError: If a block is given one for the second time.
        """
        for cache in filter(_is_cache, (*args, *kwargs.values())):
            blocks = self._caches.setdefault(cache, set())
            if position in blocks:
                raise RuntimeError(
                    f"{self.sites[position].name} is given a {type(cache).__name__} for the second time, and blocks "
                    "that are recomputed do not fill it. Make a new one for each pass, or leave the block out with "
                    "blocks=[...]."
                )
            blocks.add(position)


def _ignore(tensor: Tensor) -> None:
    pass


def with_empty_caches(proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """A block of transformers that is given an empty cache of keys and values finds one of its own each time.

    A repetition would find the model's filled. In training nobody reads what is in it, but how a block computes may
    depend on there being one.

    Raises:
        RuntimeError: If a cache holds something already, such as a prefix.
    """
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    if not caches:
        return proceed
    if any(cache.get_seq_length() for cache in caches):
        raise RuntimeError(
            f"A block that is to be recomputed is given a {type(caches[0]).__name__} with keys and values in it, such "
            "as a prefix, which a repetition could not find as it was. Leave the block out with blocks=[...]."
        )

    def with_copies(*args: Any, **kwargs: Any) -> Any:
        return proceed(*map(_emptied, args), **{name: _emptied(value) for name, value in kwargs.items()})

    return with_copies


def _emptied(value: Any) -> Any:
    return copy.deepcopy(value) if _is_cache(value) else value


def _is_cache(value: object) -> bool:
    return any(kind.__module__ == "transformers.cache_utils" for kind in type(value).__mro__)
