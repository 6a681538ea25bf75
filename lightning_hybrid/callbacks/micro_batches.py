"""Small gradients of a training under this package's strategies: each micro-batch of each replica gives one."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.callbacks.backward_passes import loss_scale
from lightning_hybrid.functional.noise_scale import GradientSums
from lightning_hybrid.parallel.small_gradients import SmallGradients


@runtime_checkable
class WatchesGradients(Protocol):
    """What a strategy offers whose micro-batches have gradients of their own."""

    def watch_gradients(self, optimizer: Optimizer) -> SmallGradients:
        """Take squares of the gradients of each micro-batch, from the next step on."""

    def gradient_sums(self, watched: SmallGradients) -> tuple[GradientSums, bool]:
        """Sums over the micro-batches of the last batch, and whether returned weights stand for samples."""

    def gradient_norm(self, optimizer: Optimizer) -> Tensor:
        """2-norm of the whole model's gradients."""


class MicroBatches:
    """What the strategy sees in the backward passes of micro-batches.

    Args:
        trainer: Its strategy is one of `WatchesGradients`.
        optimizer: Its parameters count.

    Raises:
        ValueError: If a micro-batch's gradient is nowhere whole, or not of that micro-batch alone.
    """

    def __init__(self, trainer: Trainer, optimizer: Optimizer) -> None:
        self._trainer, self._optimizer = trainer, optimizer
        assert isinstance(trainer.strategy, WatchesGradients)
        self._strategy = trainer.strategy
        self._watched = self._strategy.watch_gradients(optimizer)
        self._by_weight = False

    def begin_window(self) -> None:
        """The strategy keeps nothing of a window."""

    def check_parts(self) -> None:
        """The first step shows how many there are."""

    def begin_batch(self, batch: Any) -> None:
        """The strategy counts samples."""

    def begin_pass(self) -> None:
        """All passes of the batch have run."""

    def end_pass(self) -> GradientSums:
        """Sums over the batch's micro-batches and all replicas; all ranks call it together."""
        sums, self._by_weight = self._strategy.gradient_sums(self._watched)
        return sums

    def finish(self, window: GradientSums) -> tuple[GradientSums, float]:
        """The sums, and the squared norm of the step's gradient; all ranks call it together."""
        square = (float(self._strategy.gradient_norm(self._optimizer)) / loss_scale(self._trainer)) ** 2
        return window, square * window.weight**2 if self._by_weight else square

    def remove(self) -> None:
        """Let the strategy alone."""
        self._watched.remove()
