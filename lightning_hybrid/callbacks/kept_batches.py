"""Batches of an epoch that are kept in host memory, to be trained on once more."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor

from lightning_hybrid.callbacks.feeds import Item, Replay
from lightning_hybrid.functional.trees import leaves_of


@dataclass(frozen=True)
class Kept:
    """One batch.

    Attributes:
        number: Within the epoch, from 0.
        item: As the loader gave it, before anything could change it.
        streams: Puts random streams back that a dataset may have drawn from, as they were after it was fetched.
    """

    number: int
    item: Item
    streams: Callable[[], None]


class KeptBatches:
    """The last batches of an epoch, in order.

    Args:
        device: Whose random streams are kept too.
        draws: Whether this process makes batches, and may draw random numbers for them; else workers do.
    """

    def __init__(self, device: torch.device, *, draws: bool) -> None:
        self._device, self._draws, self._all = device, draws, list[Kept]()

    @property
    def num_bytes(self) -> int:
        """Of all tensors in them."""
        leaves = (leaf for kept in self._all for leaf in leaves_of(kept.item[0]))
        return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))

    def add(self, number: int, item: Item) -> None:
        """Keep a copy.

        Raises:
            TypeError: If the batch cannot be copied.
        """
        try:
            batch = _copied(item[0])
        except Exception as error:
            raise TypeError(
                f"DivergenceRollback keeps copies of batches, to train on them again, and a {type(item[0]).__name__} "
                f"cannot be copied: {error!r}. Let the loader's collate_fn return what copy.deepcopy can copy."
            ) from error
        self._all.append(Kept(number, (batch, *item[1:]), _streams(self._device) if self._draws else _nothing))

    def between(self, start: int, stop: int) -> list[Kept]:
        """Those numbered from `start` on, and below `stop`."""
        return [kept for kept in self._all if start <= kept.number < stop]

    def drop(self, *, below: int = 0, start: int | None = None, stop: int = 0) -> None:
        """Forget those below a number, and those from `start` on and below `stop`."""
        inside = range(stop if start is None else start, stop)
        self._all = [kept for kept in self._all if kept.number >= below and kept.number not in inside]

    def feed(self, kept: Sequence[Kept]) -> Replay:
        """Gives copies, each with the random streams that it came with."""
        return _Feed(kept)


class _Feed(Replay):
    def __init__(self, kept: Sequence[Kept]) -> None:
        super().__init__([each.item for each in kept])
        self._streams = iter([each.streams for each in kept])

    def __next__(self) -> Item:
        batch, number, loader = super().__next__()
        item = _copied(batch), number, loader
        next(self._streams)()
        return item


def _nothing() -> None:
    """Stand for streams that nobody draws from."""


def _copied(batch: Any) -> Any:
    """As `deepcopy`, which takes several times as long for a small tensor."""
    if type(batch) is Tensor:
        return batch.clone()
    if type(batch) in (list, tuple):
        return type(batch)(map(_copied, batch))
    if type(batch) is dict:
        return {key: _copied(value) for key, value in batch.items()}
    return deepcopy(batch)


def _streams(device: torch.device) -> Callable[[], None]:
    """As `random_state` has them, without making tensors of them, which takes longer than a small batch's copy."""
    python, of_numpy, of_torch = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    module = torch.get_device_module(device) if device.type != "cpu" else None
    of_device = module.get_rng_state(device) if module is not None else None

    def put_back() -> None:
        random.setstate(python)
        numpy.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        if module is not None:
            module.set_rng_state(of_device, device)

    return put_back


@contextmanager
def unheard(trainer: Trainer) -> Iterator[None]:
    """Context in which steps are taken once more: what they log, and what they would save, is there already."""
    loggers, callbacks = list(trainer.loggers), list(trainer.callbacks)  # type: ignore[attr-defined]
    trainer.loggers = [DummyLogger() for _ in loggers]
    trainer.callbacks = [each for each in callbacks if not isinstance(each, Checkpoint)]  # type: ignore[attr-defined]
    try:
        yield
    finally:
        trainer.loggers = loggers
        trainer.callbacks = callbacks  # type: ignore[attr-defined]
