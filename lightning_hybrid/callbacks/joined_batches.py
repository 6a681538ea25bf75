"""Several batches of the loader that train as one: an accumulation window, or part of one, in one run of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import LightningModule, Trainer

from lightning_hybrid.callbacks.feeds import Item, refuse_own_fetching
from lightning_hybrid.parallel.pipeline.microbatch import batch_size, check_visible, join_batches


@runtime_checkable
class JoinsBatches(Protocol):
    """What a strategy offers that cuts batches into micro-batches."""

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one batch of the loader."""

    def join_batches(self, sizes: tuple[int, ...]) -> None:
        """Say of which batches of the loader the next one is made; none ends that."""


class JoiningFeed:
    """Gives several items of another feed as one.

    Args:
        feed: Lightning's fetcher, or another feed.
        number: Items to join; fewer are left at the end of the data.

    Attributes:
        sizes: Samples of the batches given last.
    """

    def __init__(self, feed: Any, number: int) -> None:
        self._feed, self._number = feed, number
        self.sizes: tuple[int, ...] = ()

    @property
    def done(self) -> bool:
        """Whether the batch given last is the epoch's last."""
        return bool(self._feed.done)

    def __next__(self) -> Item:
        first: Item = next(self._feed)
        batches = [first[0]]
        while len(batches) < self._number and not self._feed.done:
            try:
                batches.append(next(self._feed)[0])
            except StopIteration:  # a feed that does not know its length
                break
        if len(batches) > 1:
            for batch in batches:
                check_visible(batch)
        self.sizes = tuple(batch_size(batch) for batch in batches)
        return join_batches(batches), *first[1:]


class JoinedBatches:
    """Takes the place of how a training loop runs one batch, and lets it run several as one.

    The loop still counts the loader's batches, so that `accumulate_grad_batches`, validation, schedulers, checkpoints
    and resuming mean what they meant. Batches are joined within an accumulation window, and up to where an epoch ends
    or validation is due. Hooks run once, with the number of the first.

    Args:
        number: Most batches that are joined; may be changed between two batches.
    """

    def __init__(self, number: int = 1) -> None:
        self.number = number

    def run(self, trainer: Trainer, advance: Callable[[Any], None], fetcher: Any) -> None:
        """Run `advance` on as many batches as belong together; see `compat.around_advance`."""
        number = min(self.number, batches_left(trainer))
        if number == 1:
            advance(fetcher)
            return
        feed, strategy = JoiningFeed(fetcher, number), trainer.strategy
        assert isinstance(strategy, JoinsBatches)
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress

        def begin() -> int:
            strategy.join_batches(feed.sizes if len(feed.sizes) > 1 else ())
            return len(feed.sizes)

        with counting(progress, begin):
            try:
                advance(feed)
            finally:
                strategy.join_batches(())


def refuse_joining(trainer: Trainer, pl_module: LightningModule, name: str) -> None:
    """Refuse what has no micro-batches, or makes its own; call it in `setup`.

    Args:
        trainer: The Trainer.
        pl_module: The model.
        name: Of the callback's argument that asks for it, for the error.

    Raises:
        ValueError: With what stands in the way, and the way out.
    """
    kind = type(pl_module).__name__
    refuse_own_fetching(pl_module, name)
    if not hasattr(trainer.strategy, "join_batches"):
        raise ValueError(
            f"{name} lets a run of a pipeline's schedule have more micro-batches, and "
            f"{type(trainer.strategy).__name__} has no such schedule. Use "
            "strategy='hybrid_ptdp', or leave it out: the batch grows by accumulation."
        )
    if hasattr(pl_module, "split_batch"):
        raise ValueError(
            f"{name} joins batches of the loader by their samples, and {kind} has split_batch for others. Leave it "
            "out: the batch grows by accumulation."
        )


def batches_left(trainer: Trainer) -> int:
    """Batches up to the end of the accumulation window, to that of the epoch or to a validation, whichever is first.

    Args:
        trainer: Between two batches of a fit.
    """
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    done, window = progress.current.ready, trainer.accumulate_grad_batches
    left = [window - done % window, trainer.num_training_batches - done]
    interval = trainer.val_check_batch  # None if validation is due by time
    if interval is not None:
        passed = progress.total.ready if trainer.check_val_every_n_epoch is None else done
        left.append(interval - passed % interval)
    return int(max(1, min(left)))


@contextmanager
def counting(progress: Any, begin: Callable[[], int]) -> Iterator[None]:
    """Context in which a loop counts one batch as several, at each moment at which it counts.

    Args:
        progress: Of the loop's batches.
        begin: Is called when a batch is there, and says for how many it counts.
    """
    number = 1

    def ready() -> None:
        nonlocal number
        number = begin()
        count("ready")

    def count(name: str) -> None:
        for counts in (progress.current, progress.total):
            setattr(counts, name, getattr(counts, name) + number)
            if name == "processed":  # one is left for the loop, as a checkpoint of `on_train_batch_end` has it
                counts.completed += number - 1

    counters = {"ready": ready, "started": partial(count, "started"), "processed": partial(count, "processed")}
    vars(progress).update({f"increment_{name}": counter for name, counter in counters.items()})
    try:
        yield
    finally:
        for name in counters:
            vars(progress).pop(f"increment_{name}", None)
