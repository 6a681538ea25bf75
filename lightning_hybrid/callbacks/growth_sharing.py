"""Who takes which part of a batch that grows: accumulation, and longer runs of a pipeline's schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_hybrid.callbacks.arguments import check_whole
from lightning_hybrid.callbacks.global_batch import num_replicas
from lightning_hybrid.callbacks.joined_batches import JoinedBatches, JoinsBatches, refuse_joining
from lightning_hybrid.compat import around_advance
from lightning_hybrid.functional.growth import Shares, share_out

ASKED = "BatchSizeGrowth(max_microbatches={})"


class BatchSharing:
    """Shares out a fit's batches, and gives the Trainer its own accumulation back.

    Args:
        max_accumulate: Most runs of a step, while there may be longer ones; None sets no limit.
        max_microbatches: Most micro-batches of a run; None leaves them to the strategy.

    Attributes:
        trainer: Of the fit, from `setup` on; None outside.

    Raises:
        ValueError: If a number is below 1, or one has no effect.
    """

    def __init__(self, max_accumulate: int | None, max_microbatches: int | None) -> None:
        if max_accumulate is not None:
            check_whole("max_accumulate", max_accumulate, 1)
        if max_microbatches is not None:
            check_whole("max_microbatches", max_microbatches, 1)
        if (max_accumulate is None) != (max_microbatches is None):
            raise ValueError(
                f"max_accumulate={max_accumulate} and max_microbatches={max_microbatches}: the batch grows by more "
                "micro-batches when it accumulates max_accumulate batches. Give both, or neither."
            )
        self.max_accumulate, self.max_microbatches = max_accumulate, max_microbatches
        self.trainer: Trainer | None = None
        self._joined, self._end = JoinedBatches(), _nothing
        self._own = 1  # the Trainer's own accumulate_grad_batches

    def setup(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A fit begins.

        Raises:
            ValueError: If its batches cannot be joined.
        """
        if self.max_microbatches is not None:
            refuse_joining(trainer, pl_module, ASKED.format(self.max_microbatches))
        self.trainer, self._own, self._joined.number = trainer, trainer.accumulate_grad_batches, 1

    def attach(self, prepare: Callable[[Trainer], None]) -> None:
        """Run the fit's batches, each after `prepare`; in `on_fit_start`, so that who asks later is around both."""
        assert self.trainer is not None
        trainer = self.trainer

        def run(advance: Callable[[Any], None], fetcher: Any) -> None:
            prepare(trainer)
            self._joined.run(trainer, advance, fetcher)

        self._end = around_advance(trainer, run)

    def check(self) -> None:
        """Refuse runs with fewer micro-batches than one batch of the loader has; from `on_train_start` on.

        Raises:
            ValueError: With both numbers.
        """
        if self.max_microbatches is not None and self.max_microbatches < self._of_one:
            raise ValueError(
                f"{ASKED.format(self.max_microbatches)}: a batch of the loader has {self._of_one} micro-batches "
                "already. Give a multiple of that, or a smaller num_microbatches to the strategy."
            )

    def shares(self, batches: int) -> Shares:
        """How a step of `batches` batches of the loader on each replica is shared out."""
        assert self.trainer is not None
        replicas = num_replicas(self.trainer)
        longest = 1 if self.max_microbatches is None else self.max_microbatches // self._of_one
        return share_out(batches * replicas, replicas, self.max_accumulate, longest)

    def apply(self, shares: Shares) -> None:
        """Share out the steps that come so; call it between two windows."""
        assert self.trainer is not None
        self.trainer.accumulate_grad_batches = shares.accumulate * shares.merged
        self._joined.number = shares.merged

    def give_back(self) -> None:
        """Let the Trainer have its own accumulation, and its loop run batches by itself, after a fit."""
        if self.trainer is not None:
            self.trainer.accumulate_grad_batches = self._own
        self._end()
        self.trainer, self._end = None, _nothing

    @property
    def _of_one(self) -> int:
        assert self.trainer is not None
        strategy = self.trainer.strategy
        assert isinstance(strategy, JoinsBatches)
        return strategy.num_microbatches


def _nothing() -> None:
    """Stand for what ends a fit that has not begun."""
