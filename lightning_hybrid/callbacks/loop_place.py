"""Where a training loop is in its epoch: batches and steps that it counts are set, as if they had been trained on."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

COUNTS = ("ready", "started", "processed", "completed")


class LoopPlace:
    """The place of a training loop, between two batches.

    Args:
        trainer: In `fit`.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._loop = trainer, trainer.fit_loop.epoch_loop

    @property
    def number(self) -> int:
        """Batches of the epoch so far."""
        return int(self._loop.batch_progress.current.ready)

    @property
    def begins_window(self) -> bool:
        """Whether the next batch is the first of a step."""
        return self.number % self._trainer.accumulate_grad_batches == 0

    def place(self, number: int) -> None:
        """Let the loop have counted so many batches of the epoch."""
        progress: Any = self._loop.batch_progress
        before = progress.total.ready - progress.current.ready
        for name in COUNTS:
            setattr(progress.current, name, number)
            setattr(progress.total, name, before + number)

    def end_batch(self) -> None:
        """Do what the loop does between two batches of an epoch, but for validations."""
        self._loop.update_lr_schedulers("step", update_plateau_schedulers=True)
        self._count_steps(self.begins_window)

    def pass_over(self, fetcher: Any, stop: int) -> None:
        """Take batches up to a number from a fetcher, as the loop's last step, in which nothing has been trained."""
        while self.number < stop and not fetcher.done:
            next(fetcher)
            self.place(self.number + 1)
        self._loop.val_loop.restarting = False
        self._loop.batch_progress.is_last_batch = bool(fetcher.done)
        if fetcher.done or self.number == self._trainer.num_training_batches:
            self._loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        self._count_steps(-1)  # the loop counts one
        self._loop.__dict__["update_lr_schedulers"] = lambda *args, **kwargs: self.release()

    def release(self) -> None:
        """Let schedules that watch a value hear of it again; after `pass_over` they do not once."""
        self._loop.__dict__.pop("update_lr_schedulers", None)

    def _count_steps(self, number: int) -> None:
        """Of loggers."""
        name = "_batches_that_stepped"
        counts = self._loop.on_save_checkpoint()
        self._loop.on_load_checkpoint({**counts, name: counts[name] + number})
