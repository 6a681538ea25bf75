"""Which calls of modules are recomputed together, and how they are watched while costs are measured."""

from __future__ import annotations

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
        self._open: Callable[[], Frame | None] = lambda: None
        self._last = -1

    def layer(self, position: int) -> Layer:
        """The layer of one site's calls."""

        def layer(proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self.call(position, proceed, args, kwargs)

        return layer

    def call(self, position: int, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a site's call."""
        segment, site = self.segments[position], self.sites[position]
        if segment is None or not torch.is_grad_enabled():
            self._open = lambda: None
            return proceed(*args, **kwargs)
        args, kwargs = without_caches(args, kwargs)
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


def _ignore(tensor: Tensor) -> None:
    pass


def without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a block of transformers without a cache of keys and values, which a repetition would find full.

    In training nobody reads it; transformers' own checkpointing takes it away too.
    """
    if not any(map(_is_cache, (*args, *kwargs.values()))):
        return args, kwargs
    kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    if "use_cache" in kwargs:
        kwargs["use_cache"] = False
    return tuple(None if _is_cache(value) else value for value in args), kwargs


def _is_cache(value: object) -> bool:
    return any(kind.__module__ == "transformers.cache_utils" for kind in type(value).__mro__)
