"""Saves that go on while training does: a copy in host memory, and one thread that writes it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from io import BytesIO
from typing import TypeVar

import torch

from lightning_hybrid.parallel.checkpoint.parts import Part, Parts, Piece

T = TypeVar("T")


class Background:
    """At most one save in flight. Its error is raised in the thread that asks next."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._running: list[Future[None]] = []

    def start(self, task: Callable[[], None]) -> None:
        """Run a save, once the one before is done.

        Raises:
            Exception: That of the one before.
        """
        self.wait()
        self._submit(task)

    def then(self, task: Callable[[], None]) -> None:
        """Run something when the save in flight has succeeded, at once if there is none; not if it fails."""
        if not self._running:
            task()
            return
        before = self._running[-1]

        def after() -> None:
            if before.exception() is None:
                task()

        self._submit(after)

    @property
    def has_failed(self) -> bool:
        """Whether an error waits to be raised."""
        return any(future.done() and future.exception() is not None for future in self._running)

    def wait(self) -> None:
        """Wait for the save in flight, and raise its error."""
        running, self._running = self._running, []
        for future in running:
            future.exception()
        for future in running:
            future.result()

    def end(self) -> None:
        """Let the thread go; the next save takes another."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def _submit(self, task: Callable[[], None]) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running.append(self._pool.submit(task))


class HostCopies:
    """Copies of parts in host memory, which is kept from one save to the next."""

    def __init__(self) -> None:
        self._memory: dict[str, list[torch.Tensor]] = {}

    @torch.no_grad()
    def take(self, parts: Parts) -> dict[str, Part]:
        """The parts as they are now, whatever training does to their tensors."""
        memory, copied = dict[str, list[torch.Tensor]](), dict[str, Part]()
        for name, part in parts.items():
            known = self._memory.get(name, [])
            kept = [
                known[i] if i < len(known) and _fits(known[i], piece.data) else _host_like(piece.data)
                for i, piece in enumerate(part.pieces)
            ]
            for copy, piece in zip(kept, part.pieces, strict=True):
                copy.copy_(piece.data)
            memory[name] = kept
            pieces = tuple(Piece(piece.box, copy) for copy, piece in zip(kept, part.pieces, strict=True))
            copied[name] = Part(part.shape, part.dtype, pieces)
        self._memory = memory
        return copied


def copy_of_objects(objects: T) -> T:
    """What a file would hold of objects as they are now: hooks and callbacks may give what they go on changing.

    What cannot be saved is given back as it is, and fails where it is written, on all ranks.
    """
    with suppress(Exception):
        memory = BytesIO()
        torch.save(objects, memory)
        memory.seek(0)
        copy: T = torch.load(memory, map_location="cpu", weights_only=False)
        return copy
    return objects


def _fits(memory: torch.Tensor, data: torch.Tensor) -> bool:
    return memory.shape == data.shape and memory.dtype == data.dtype


def _host_like(data: torch.Tensor) -> torch.Tensor:
    return torch.empty(data.shape, dtype=data.dtype, pin_memory=data.device.type == "cuda")
