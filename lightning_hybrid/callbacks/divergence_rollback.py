"""Runs that go back before a loss that has collapsed, leave out the batches that it collapsed on, and go on."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from math import isfinite, nan
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hybrid.callbacks.first_not_finite import FirstNotFinite, Found
from lightning_hybrid.callbacks.going_back import BadWindow, Course, Diverged, Retry
from lightning_hybrid.callbacks.rate_factors import RateFactors
from lightning_hybrid.callbacks.rollback_audit import RollbackAudit
from lightning_hybrid.callbacks.rollback_checks import check_arguments, refuse_loaders_ahead, refuse_runs
from lightning_hybrid.callbacks.step_values import step_values
from lightning_hybrid.compat import around_advance
from lightning_hybrid.functional.divergence import SpikeWindow, not_finite
from lightning_hybrid.optim.restarting import forget_all, made_by_constructor


class DivergenceRollback(Callback):
    """Goes back before a step whose loss or gradients have collapsed, leaves its batches out, and trains on.

    All ranks judge the loss and the 2-norm of the gradients of each step, over all replicas, before its update. If it
    is bad, the run is put back to a snapshot (parameters, optimizer, loss scale, schedules, states of callbacks, random
    streams), trains on the good batches since then once more, and passes over the bad ones on every replica. The
    weights are those of a run that never had these batches. A step that a loss scaler skips is not judged.

    Args:
        detector: "nan" for a loss or norm that is not finite; "spike" also for one far above those of the last steps;
            or a function of both that says whether the run has diverged.
        keep: Snapshots in host memory.
        snapshot_every: Steps from one to the next. One more is taken at the beginning of an epoch and after each
            validation, over which nothing goes back. The batches since the oldest are in host memory too.
        skip_batches: Batches of each replica that are left out, the last of them that in which the collapse was seen,
            rounded up to whole steps; None leaves out those of that step.
        max_retries: Times in a row that a run may go back; after `snapshot_every` good steps the count begins anew.
            Each further time it goes back to an older snapshot, if there is one.
        on_retry: What to do before training goes on: "lower_lr" multiplies learning rates by `lr_factor`, for the rest
            of the run; "restart_optimizer" clears the optimizer's state; a function gets (trainer, module, retry).
        lr_factor: Of "lower_lr".
        window: Good steps that "spike" compares with.
        threshold: Robust standard deviations above their median from which on "spike" calls a step bad.
        checkpoint_dir: Folder, shared by all ranks, of checkpoints that take the place of parameters and optimizer
            states in host memory. They are removed when the run ends well; after a failure they can be resumed from.
        audit: File with a line for each time that the run went back; None is "divergence.csv" in `default_root_dir`.

    Attributes:
        retries: Times in a row.
        rollbacks: Times altogether.

    Raises:
        ValueError: If an argument is out of range.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, section 5.1; Zhang et al. 2022, arXiv:2205.01068, section 2.5.
    """

    goes_back = False  # what it has done stays

    def __init__(
        self,
        detector: Literal["nan", "spike"] | Callable[[float, float], bool] = "nan",
        keep: int = 2,
        snapshot_every: int = 100,
        skip_batches: int | None = None,
        max_retries: int = 3,
        on_retry: Literal["lower_lr", "restart_optimizer"]
        | Callable[[Trainer, LightningModule, int], Any]
        | None = None,
        lr_factor: float = 0.5,
        window: int = 50,
        threshold: float = 10.0,
        checkpoint_dir: str | None = None,
        audit: str | None = None,
    ) -> None:
        super().__init__()
        check_arguments(keep, snapshot_every, skip_batches, max_retries, detector, on_retry, lr_factor)
        self.detector, self.keep, self.snapshot_every = detector, keep, snapshot_every
        self.skip_batches, self.max_retries = skip_batches, max_retries
        self.on_retry, self.lr_factor = on_retry, lr_factor
        self.checkpoint_dir, self.audit = checkpoint_dir, audit
        self._spikes = SpikeWindow(window, threshold)
        self.retries = self.rollbacks = self._healthy_from = 0
        self._rate = 1.0
        self._left_out: list[tuple[int, int, int]] = []
        self._losses: list[Tensor] = []
        self._course: Course | None = None
        self._searching = self._is_judged = self._is_behind = False
        self._stop: Callable[[], object] | None = None
        self._made: list[Any] = []

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self.retries = self.rollbacks = self._healthy_from = 0
            self._rate, self._left_out, self._is_behind = 1.0, [], False
            self._spikes.clear()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        refuse_runs(trainer, pl_module, saves=self.checkpoint_dir is not None)
        if self.on_retry == "restart_optimizer":
            self._made = [made_by_constructor(optimizer) for optimizer in trainer.optimizers]
        if self.on_retry == "lower_lr":
            for optimizer in trainer.optimizers:
                RateFactors.of(optimizer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_behind:
            refuse_loaders_ahead(trainer)
        path = self.audit or os.path.join(trainer.default_root_dir, "divergence.csv")
        self._audit = RollbackAudit(path)
        decide = partial(self._decide, trainer, pl_module)
        options: dict[str, Any] = {"keep": self.keep, "every": self.snapshot_every, "folder": self.checkpoint_dir}
        self._course = Course(trainer, pl_module, **options, decide=decide, detector=self._spikes)
        self._course.left_out = list(self._left_out)
        self._stop = around_advance(trainer, self._run)
        self._lower(trainer)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stale()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._course is not None:
            self._course.on_validation()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stale()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._losses = []
        self._is_judged = False

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        joined = getattr(trainer.strategy, "joined_batches", 1)  # Lightning divides by batches of the loader
        self._losses.append(loss.detach() * joined)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._searching:
            raise Diverged(nan, nan, "once more")
        if self._is_judged:  # LBFGS evaluates a step several times, the first time before its update
            return
        self._is_judged = True
        values = step_values(trainer, optimizer, self._losses)
        if values is None:
            return
        loss, norm = values
        reason = self._judge(loss, norm)
        if trainer.strategy.reduce_boolean_decision(bool(reason), all=False):
            raise Diverged(loss, norm, reason or "another rank says so")
        self._spikes.add(loss, norm)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.rollbacks:
            rank_zero_info(f"DivergenceRollback went back {self.rollbacks} time(s); see {self._audit.path}.")

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end(trainer, failed=False)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end(trainer, failed=True)

    @override
    def state_dict(self) -> dict[str, Any]:
        course = self._course
        left_out = course.left_out if course is not None else self._left_out
        is_behind = course.is_going_back if course is not None else self._is_behind
        return {
            "retries": self.retries,
            "rollbacks": self.rollbacks,
            "healthy_from": self._healthy_from,
            "rate": self._rate,
            "left_out": [list(each) for each in left_out],
            "is_behind": is_behind,
            "spikes": self._spikes.state_dict(),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.retries, self.rollbacks = state_dict["retries"], state_dict["rollbacks"]
        self._healthy_from, self._rate = state_dict["healthy_from"], state_dict["rate"]
        self._left_out = [tuple(each) for each in state_dict["left_out"]]
        self._is_behind = state_dict.get("is_behind", False)
        self._spikes.load_state_dict(state_dict["spikes"])

    def _run(self, advance: Callable[[Any], None], fetcher: Any) -> None:
        assert self._course is not None
        self._advance = advance
        self._course.run(advance, fetcher)

    def _stale(self) -> None:
        if self._course is not None:
            self._course.is_stale = True

    def _judge(self, loss: float, norm: float) -> str:
        if callable(self.detector):
            return "the detector says so" if self.detector(loss, norm) else ""
        return self._spikes.judge(loss, norm) if self.detector == "spike" else not_finite(loss, norm)

    def _decide(self, trainer: Trainer, pl_module: LightningModule, bad: BadWindow) -> Retry:
        """Where to go back to.

        Raises:
            RuntimeError: If the run has gone back often enough, or there is nothing to go back to.
        """
        course = self._course
        assert course is not None
        step = int(trainer.global_step)
        self.retries = self.retries + 1 if step < self._healthy_from else 1
        self._healthy_from = step + self.snapshot_every
        first, stop = course.left_out_with(bad, self.skip_batches or 1)
        older = [snapshot for snapshot in course.snapshots if snapshot.batch <= first]
        snapshot = older[-min(self.retries, len(older))] if older else None
        goes_on = snapshot is not None and self.retries <= self.max_retries
        culprit = self._culprit(trainer, pl_module, bad)
        self._audit.add(
            trainer,
            retry=self.retries,
            epoch=trainer.current_epoch,
            step=step,
            batches=f"{first}-{stop - 1}" if stop - first > 1 else str(first),
            back_to_step=snapshot.step if snapshot is not None else None,
            reason=bad.error.reason,
            loss=bad.error.loss,
            gradient_norm=bad.error.norm,
            **({} if culprit is None else culprit.shown(bad.first)),
            action=self._action if goes_on else "stopped",
        )
        if snapshot is None or not goes_on:
            raise RuntimeError(self._audit.used_up(self.retries, self.max_retries, self.snapshot_every))
        self.rollbacks += 1
        return Retry(snapshot, first, stop, partial(self._then, trainer, pl_module))

    def _culprit(self, trainer: Trainer, pl_module: LightningModule, bad: BadWindow) -> Found | None:
        """Run the window again, to see which module's output is the first that is not finite."""
        if isfinite(bad.error.loss) and isfinite(bad.error.norm):
            return None
        assert self._course is not None
        self._searching = True
        try:
            with FirstNotFinite(trainer, pl_module) as search:
                self._course.run_again(self._advance, bad)
            return search.found()
        finally:
            self._searching = False

    @property
    def _action(self) -> str:
        return self.on_retry if isinstance(self.on_retry, str) else getattr(self.on_retry, "__name__", "go on")

    def _then(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.on_retry == "lower_lr":
            self._rate *= self.lr_factor
            self._lower(trainer)
        elif self.on_retry == "restart_optimizer":
            for optimizer, made in zip(trainer.optimizers, self._made, strict=True):
                forget_all(optimizer, made)
        elif self.on_retry is not None:
            assert callable(self.on_retry)
            self.on_retry(trainer, pl_module, self.retries)

    def _lower(self, trainer: Trainer) -> None:
        if self._rate != 1:
            for optimizer in trainer.optimizers:
                RateFactors.of(optimizer).set(self, self._rate)

    def _end(self, trainer: Trainer, *, failed: bool) -> None:
        if self._stop is not None:
            self._stop()
            self._stop = None
        if self._course is not None:
            self._left_out, self._is_behind = self._course.left_out, self._course.is_going_back
            self._course.end(failed=failed)
            self._course = None
        if self.on_retry == "lower_lr":
            for optimizer in trainer.optimizers:
                RateFactors.of(optimizer).give_back()
                RateFactors.of(optimizer).remove(self)
