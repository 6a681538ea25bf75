"""The course of a fit that can go back: snapshots, batches since then, and the way forward again."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader

from lightning_hybrid.callbacks.callback_states import OverValidation, leave_batch
from lightning_hybrid.callbacks.feeds import Item, Recorder
from lightning_hybrid.callbacks.kept_batches import Kept, KeptBatches, unheard
from lightning_hybrid.callbacks.loop_place import LoopPlace
from lightning_hybrid.callbacks.run_snapshot import HostCopies, RunSnapshot
from lightning_hybrid.compat import forget_saved
from lightning_hybrid.functional.divergence import SpikeWindow

Advance = Callable[[Any], None]


class Diverged(Exception):
    """Leaves a step before its update: no later hook sees it.

    Args:
        loss: Of the step.
        norm: Of its gradients.
        reason: What is wrong.
    """

    def __init__(self, loss: float, norm: float, reason: str) -> None:
        super().__init__(reason)
        self.loss, self.norm, self.reason = loss, norm, reason


@dataclass(frozen=True)
class BadWindow:
    """Batches of a step that diverged: numbers within the epoch from `first` on, below `stop`."""

    first: int
    stop: int
    error: Diverged


@dataclass(frozen=True)
class Retry:
    """Where a run goes back to, and what it leaves out.

    Attributes:
        snapshot: From here.
        first: First batch that is left out.
        stop: Up to here all are.
        then: Called when everything is as it was.
    """

    snapshot: RunSnapshot
    first: int
    stop: int
    then: Callable[[], None]


class Course:
    """Takes the place of `advance` in a training loop.

    Nothing goes back over the beginning of an epoch, or over a validation, whose random numbers and effects would not
    come a second time: there all begins with a new snapshot.

    Args:
        trainer: In `on_train_start`.
        pl_module: Its module.
        keep: Number of snapshots.
        every: Applied steps from one to the next.
        folder: Of checkpoints in their place; None for snapshots in memory.
        decide: What to do about a bad window; raises if there is nothing to be done.
        detector: What it has seen of the steps goes back with them.

    Attributes:
        snapshots: Oldest first.
        left_out: (epoch, first, stop) of batches that are never trained on.
        is_stale: What is kept cannot be gone back to any more.
        is_going_back: Until the run is where it diverged; the loader's place is there already.
    """

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        *,
        keep: int,
        every: int,
        folder: str | None,
        decide: Callable[[BadWindow], Retry],
        detector: SpikeWindow,
    ) -> None:
        self._trainer, self._module, self._keep, self._every, self._decide = trainer, pl_module, keep, every, decide
        self._folder, self._detector, self._place = folder, detector, LoopPlace(trainer)
        loaders = CombinedLoader(trainer.train_dataloader, "sequential").flattened
        draws = any(getattr(loader, "num_workers", 0) == 0 for loader in loaders)
        self._batches, self._copies = KeptBatches(trainer.strategy.root_device, draws=draws), HostCopies()
        self.snapshots: list[RunSnapshot] = []
        self.left_out: list[tuple[int, int, int]] = []
        self.is_stale, self.is_going_back = True, False
        self._fetched = self._place.number
        self._window = self._fetched - self._fetched % trainer.accumulate_grad_batches
        self._sizes: dict[int, int] = {}  # of windows, by their first batch
        self._validations: list[OverValidation] = []  # within the present window

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Host memory of this rank: of the snapshots, and of the batches."""
        return sum(snapshot.num_bytes for snapshot in self.snapshots), self._batches.num_bytes

    def run(self, advance: Advance, fetcher: Any) -> None:
        """One batch, or a way back and forward again."""
        if self._place.begins_window:
            if self._pass_left_out(fetcher):
                return
            self._validations = []
            self._keep_snapshot()
            self._begin_window()
        for validation in self._validations:
            validation.end()
        self._fetched = self._place.number
        try:
            self._advance(advance, Recorder(fetcher, self._note))
        except Diverged as error:
            self._retry(advance, fetcher, BadWindow(self._window, self._fetched, error))

    def on_validation(self) -> None:
        """One begins."""
        if not self._place.begins_window:
            self._validations.append(OverValidation(self._trainer, self._module))

    def left_out_with(self, window: BadWindow, batches: int) -> tuple[int, int]:
        """First batch that is left out with a bad window, and the number up to which all are.

        Args:
            window: The last of them; the windows after them begin where those of their size can.
            batches: At least so many, in whole windows, of what can be gone back over.
        """
        oldest = self.snapshots[0].batch if self.snapshots and not self.is_stale else window.first
        starts = [start for start in sorted(self._sizes) if oldest <= start <= window.first]
        first = max((start for start in starts if window.stop - start >= batches), default=oldest)
        size = self._sizes.get(first, 1)
        stop = min(-(-window.stop // size) * size, self._trainer.num_training_batches)
        return first, max(window.stop, int(stop))

    def run_again(self, advance: Advance, window: BadWindow) -> None:
        """Run a window's batches once more, for who watches; the step's end is left to whoever raises there."""
        kept = self._batches.between(window.first, window.stop)
        self._place.place(window.first)
        with unheard(self._trainer), suppress(Diverged):
            self._train(advance, kept)

    def end(self, *, failed: bool) -> None:
        """Forget everything; checkpoints of a run that has failed stay, to be resumed from."""
        self._place.release()
        if not failed or self._folder is None:
            self._forget()

    def _note(self, item: Item) -> None:
        if self.snapshots:
            self._batches.add(self._fetched, item)
        self._fetched += 1

    def _forget(self) -> None:
        for snapshot in self.snapshots:
            snapshot.drop()
        self.snapshots, self._sizes = [], {}
        self._batches.drop(below=self._fetched)

    def _keep_snapshot(self) -> None:
        if self.is_stale:
            self._forget()
        elif self._trainer.global_step - self.snapshots[-1].step < self._every:
            return
        self.is_stale = False
        while len(self.snapshots) >= self._keep:
            self.snapshots.pop(0).drop()
        name = f"rollback-epoch={self._trainer.current_epoch}-step={self._trainer.global_step}.ckpt"
        path = None if self._folder is None else os.path.join(self._folder, name)
        self.snapshots.append(RunSnapshot(self._trainer, self._module, self._copies, path, self._detector))
        self._batches.drop(below=self.snapshots[0].batch)
        self._sizes = {first: size for first, size in self._sizes.items() if first >= self.snapshots[0].batch}

    def _begin_window(self) -> None:
        self._window = self._place.number
        self._sizes[self._window] = self._trainer.accumulate_grad_batches

    def _pass_left_out(self, fetcher: Any) -> bool:
        """Pass over batches that the run has left out before it was interrupted; whether there are any."""
        epoch = self._trainer.current_epoch
        ends = [stop for of, first, stop in self.left_out if of == epoch and first <= self._place.number < stop]
        if ends:
            self._place.pass_over(fetcher, ends[0])
        return bool(ends)

    def _retry(self, advance: Advance, fetcher: Any, window: BadWindow) -> None:
        """Go back, train on what is good, and count what is left out as seen; again, if that diverges too."""
        self.is_going_back, fetched = True, window.stop
        while True:
            retry = self._decide(window)
            try:
                self._go_back(advance, retry)
                break
            except Diverged as error:
                window = BadWindow(self._window, retry.stop, error)
        self._place.place(fetched)
        self._place.pass_over(fetcher, retry.stop)
        self.is_going_back = False

    def _go_back(self, advance: Advance, retry: Retry) -> None:
        """Train on the good batches since a snapshot."""
        snapshot, epoch, stop = retry.snapshot, self._trainer.current_epoch, retry.stop
        snapshot.put_back()
        while self.snapshots[-1] is not snapshot:
            self.snapshots.pop().drop()
        self._batches.drop(start=retry.first, stop=stop)
        self._sizes = {first: size for first, size in self._sizes.items() if first <= retry.first}
        self.left_out = [each for each in self.left_out if each[0] == epoch and each[1] < retry.first]
        self.left_out.append((epoch, retry.first, stop))
        size = self._trainer.accumulate_grad_batches
        retry.then()
        if self._trainer.accumulate_grad_batches != size:
            raise RuntimeError(
                f"on_retry has changed accumulate_grad_batches from {size} to {self._trainer.accumulate_grad_batches}, "
                "with which the batches that are trained on again would make other steps. Leave it as it is there; "
                "BatchSizeGrowth changes it between two steps."
            )
        with unheard(self._trainer):
            self._train(advance, self._batches.between(snapshot.batch, stop))
        for validation in self._validations:
            validation.put_back()
        for callback in self._trainer.callbacks:  # type: ignore[attr-defined]
            forget_saved(callback, int(self._trainer.global_step))

    def _train(self, advance: Advance, kept: list[Kept]) -> None:
        """Train on batches, which may have gaps between them."""
        while kept:
            length = next((i for i, each in enumerate(kept) if each.number != kept[0].number + i), len(kept))
            together, kept = kept[:length], kept[length:]
            self._place.place(together[0].number)
            feed = self._batches.feed(together)
            while self._place.number <= together[-1].number:
                if self._place.begins_window:
                    self._begin_window()
                self._advance(advance, feed)
                self._place.end_batch()

    def _advance(self, advance: Advance, feed: Any) -> None:
        try:
            advance(feed)
        except Diverged:
            leave_batch(self._trainer)
            raise
