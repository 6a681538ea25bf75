"""Who takes which part of a batch that grows: accumulation, longer runs of a pipeline's schedule, more replicas."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_hybrid.callbacks.arguments import check_whole
from lightning_hybrid.callbacks.global_batch import num_replicas
from lightning_hybrid.callbacks.growth_replicas import MoreReplicas
from lightning_hybrid.callbacks.joined_batches import JoinedBatches, JoinsBatches, refuse_joining
from lightning_hybrid.compat import around_advance
from lightning_hybrid.functional.growth import Shares, share_out

ASKED = "BatchSizeGrowth(max_microbatches={})"


class BatchSharing:
    """Shares out a fit's batches, and gives the Trainer its own accumulation back.

    Args:
        max_accumulate: Most runs of a step, while there may be longer ones; None sets no limit.
        max_microbatches: Most micro-batches of a run; None leaves them to the strategy.
        max_replicas: Most replicas; None keeps those that there are.
        dirpath: Folder that all nodes share, for more replicas.

    Attributes:
        trainer: Of the fit, from `setup` on; None outside.

    Raises:
        ValueError: If a number is below 1, or one has no effect.
    """

    def __init__(
        self,
        max_accumulate: int | None,
        max_microbatches: int | None,
        max_replicas: int | None = None,
        dirpath: str | os.PathLike[str] | None = None,
    ) -> None:
        if max_accumulate is not None:
            check_whole("max_accumulate", max_accumulate, 1)
        if max_microbatches is not None:
            check_whole("max_microbatches", max_microbatches, 1)
        if (max_accumulate is None) != (max_microbatches is None and max_replicas is None):
            raise ValueError(
                f"max_accumulate={max_accumulate}, max_microbatches={max_microbatches}, max_replicas={max_replicas}: "
                "the batch grows by more micro-batches, or replicas, when it accumulates max_accumulate batches. Give "
                "it with one of them, or none."
            )
        self._replicas = None if max_replicas is None else MoreReplicas(max_replicas, dirpath)
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
        if self._replicas is not None:
            self._replicas.check(trainer)
        self.trainer, self._own, self._joined.number = trainer, trainer.accumulate_grad_batches, 1

    def attach(self, prepare: Callable[[Trainer], None]) -> None:
        """Run the fit's batches, each after `prepare`; in `on_fit_start`, so that who asks later is around both."""
        assert self.trainer is not None
        trainer = self.trainer

        def run(advance: Callable[[Any], None], fetcher: Any) -> None:
            loop = trainer.fit_loop.epoch_loop
            if loop.restarting and loop.batch_idx < 0:  # else the last epoch's end is gone through, and counts a step
                loop.restarting = False
            prepare(trainer)
            self._joined.run(trainer, advance, fetcher)

        self._end = around_advance(trainer, run)

    def check(self) -> None:
        """Refuse runs with fewer micro-batches than one batch of the loader has; in `on_train_start`.

        Raises:
            ValueError: With both numbers.
        """
        assert self.trainer is not None
        if self._replicas is not None:
            self._replicas.check_loaders(self.trainer)
        if self.max_microbatches is not None and self.max_microbatches < self._of_one:
            raise ValueError(
                f"{ASKED.format(self.max_microbatches)}: a batch of the loader has {self._of_one} micro-batches "
                "already. Give a multiple of that, or a smaller num_microbatches to the strategy."
            )

    def shares(self, batches: int) -> Shares:
        """How a step of `batches` batches of the loader on each replica is shared out."""
        assert self.trainer is not None
        replicas = num_replicas(self.trainer)
        return share_out(batches * replicas, replicas, self.max_accumulate, self._longest)

    def apply(self, shares: Shares) -> None:
        """Share out the steps that come so; call it between two windows."""
        assert self.trainer is not None
        self.trainer.accumulate_grad_batches = shares.accumulate * shares.merged
        self._joined.number = shares.merged

    def take_in(self, batches: Sequence[int], *, may_leave: bool = True) -> None:
        """Leave if nodes wait that the present level can use; all ranks call it between two windows.

        Args:
            batches: Batches of the loader in a step on each replica, at the present level and at those to come.
            may_leave: Whether it may, or only says what the level is like.
        """
        if self._replicas is not None:
            assert self.trainer is not None
            replicas = num_replicas(self.trainer)
            of_all = [each * replicas for each in batches]
            limits = self.max_accumulate, self._longest, self._replicas.max_replicas
            wanted = share_out(of_all[0], replicas, *limits).replicas
            self._replicas.tell(self.trainer, of_all, wanted)
            if may_leave:
                self._replicas.take_in(self.trainer, of_all, wanted)

    def end(self) -> None:
        """Training has ended, in `on_train_end`."""
        if self._replicas is not None:
            assert self.trainer is not None
            self._replicas.end(self.trainer)

    def on_exception(self, error: BaseException) -> None:
        """A fit has failed, or is to leave."""
        if self._replicas is not None:
            self._replicas.on_exception(error)

    def give_back(self) -> None:
        """Let the Trainer have its own accumulation, and its loop run batches by itself, after a fit."""
        if self.trainer is not None:
            self.trainer.accumulate_grad_batches = self._own
        self._end()
        self.trainer, self._end = None, _nothing

    @property
    def _longest(self) -> int:
        """Most batches of the loader in a run."""
        return 1 if self.max_microbatches is None else self.max_microbatches // self._of_one

    @property
    def _of_one(self) -> int:
        assert self.trainer is not None
        strategy = self.trainer.strategy
        assert isinstance(strategy, JoinsBatches)
        return strategy.num_microbatches


def _nothing() -> None:
    """Stand for what ends a fit that has not begun."""
