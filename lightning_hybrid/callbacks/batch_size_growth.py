"""Batches that grow where a schedule would let the learning rate decay."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import Self, override

from lightning_hybrid.callbacks.fit_factors import STATES, FitFactors, states_of_any
from lightning_hybrid.callbacks.global_batch import count_samples, count_tokens, loader_batch_of_all, over_replicas
from lightning_hybrid.callbacks.growth_arguments import (
    check_choices,
    check_patience,
    check_place,
    check_schedulers,
    check_trainer,
    check_validation,
    decays_of,
    plan_of,
)
from lightning_hybrid.callbacks.growth_progress import GrowthProgress, check_levels
from lightning_hybrid.callbacks.growth_reports import log_growth, mean_of, tell_level
from lightning_hybrid.callbacks.growth_sharing import BatchSharing
from lightning_hybrid.functional.growth import Shares, growth_of

NAME = "BatchSizeGrowth"


class BatchSizeGrowth(Callback):
    """Lets the batch of a step grow at milestones, or when a value stops to improve, and the learning rate stay.

    The batch grows by `accumulate_grad_batches`, and then by micro-batches of a pipeline's schedule. Level k has the
    global batch B_k = B_0 x factors, in whole loader batches and up to `max_batch`. What the batch cannot take, the
    rate takes: it is multiplied by (B_k / B_0) / factors. So the noise scale eps N / (B (1 - m)) is that of rates which
    decay by the factors, exactly.

    A level begins with a window: before the first batch, at or after its milestone, at which the batches of the epoch
    so far are a multiple of the old and the new `accumulate_grad_batches`. So no window is short, and samples come in
    their order, once each. An epoch's last window has what is left, as always under Lightning.

    The first batch B_0 is that of the loader, times the Trainer's `accumulate_grad_batches`, over all replicas. A run
    that goes on from a checkpoint keeps its B_0 and its levels with any number of replicas.

    `global_batch_size` (in units), `noise_scale[/group]` (N is the training set; left out if it has no length) and
    `learning_rate/*` are logged every `log_every_n_steps`.

    Args:
        milestones: Epochs, or applied steps, from which on the batch is `factor` times larger; or a factor for each.
        on_plateau: Name of a logged value; the batch grows when it has not improved for `patience` validations. Needs
            `max_batch`.
        factor: What the batch grows by, above 1.
        max_batch: Largest batch of a step over all replicas, in units. None sets no limit.
        unit: What `max_batch` and the log count: "samples", or "tokens" as in the first batch.
        interval: What milestones count: "epoch", or "step", those that the optimizer has applied.
        patience: Validations in a row without improvement.
        min_delta: What counts as improvement, at least 0.
        mode: Whether lower ("min") or higher ("max") is better.
        max_accumulate: Most runs of a step that are accumulated, while there may be more micro-batches or replicas.
        max_microbatches: Most micro-batches that one run of the pipeline's schedule has, of batches of the loader that
            are joined for it. None leaves them as the strategy has them. What exceeds all three is accumulated.
        max_replicas: Most data replicas. The run leaves with a checkpoint when nodes wait that it can use, for
            torchrun's agents to start it again with them; see `docs/elastic.md`. None keeps those that there are.
        dirpath: Folder that all nodes share, for `max_replicas`.

    Attributes:
        plan: When the batch grows, and by what.

    Raises:
        ValueError: If an argument is outside its range, or there is not one of milestones and `on_plateau`.

    Source: Smith et al. 2018, arXiv:1711.00489, sections 3 to 5.
    """

    grows_accumulation = True
    """Strategies that look at `accumulate_grad_batches` before training hear that it is not the last word."""

    def __init__(
        self,
        milestones: Sequence[int] | Mapping[int, float] | None = None,
        on_plateau: str | None = None,
        factor: float = 2,
        max_batch: int | None = None,
        unit: Literal["samples", "tokens"] = "samples",
        interval: Literal["epoch", "step"] = "epoch",
        patience: int = 5,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
        max_accumulate: int | None = None,
        max_microbatches: int | None = None,
        max_replicas: int | None = None,
        dirpath: str | os.PathLike[str] | None = None,
    ) -> None:
        check_choices(unit, interval, mode)
        check_patience(patience, min_delta)
        self.plan = plan_of(milestones, on_plateau, factor, max_batch)
        self.on_plateau, self.unit, self.interval = on_plateau, unit, interval
        self.patience, self.min_delta, self.mode = patience, min_delta, mode
        self._replaces_schedule = False
        self._factors, self._progress = FitFactors(), GrowthProgress()
        self._saved: dict[str, Any] | None = None
        self._sharing = BatchSharing(max_accumulate, max_microbatches, max_replicas, dirpath)
        self._is_running = False

    @classmethod
    def from_lr_schedule(
        cls,
        schedule: Mapping[int, float] | Sequence[int] | int,
        gamma: float | None = None,
        length: int | None = None,
        **options: Any,
    ) -> Self:
        """Growth with the noise scale that a decaying schedule has, which is left out of `configure_optimizers`.

        The batch takes as much of each decay as it can, in whole loader batches, and the rate takes the rest.

        Args:
            schedule: {milestone: factor of the first rate from there on}; or the milestones of a `MultiStepLR`; or the
                `step_size` of a `StepLR`, 1 for an `ExponentialLR`.
            gamma: The factor at each milestone, for the last two.
            length: Epochs or steps that a `step_size` goes on for.
            options: As of the constructor, without `milestones`, `on_plateau` and `factor`.

        Raises:
            ValueError: If a rate does not fall, or arguments do not belong together.
        """
        made = cls(growth_of(decays_of(schedule, gamma, length)), **options)
        made.plan, made._replaces_schedule = replace(made.plan, may_round=True), True
        return made

    @property
    def level(self) -> int:
        """How often the batch has grown."""
        return self._progress.level

    @property
    def global_batch(self) -> int:
        """Samples of a step over all replicas."""
        return self._progress.at(self.plan, self.level).batch

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._give_back()  # of a fit that has failed
        check_trainer(trainer, pl_module, NAME)
        self._sharing.setup(trainer, pl_module)
        self._factors.reset()
        self._progress, self._saved = GrowthProgress(), None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._factors.attach(trainer, NAME)
        if self._replaces_schedule:
            check_schedulers(trainer)
        self._sharing.attach(self._grow)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._factors.resume()
        self._sharing.check()
        loader_batch = self._progress.loader_batch = loader_batch_of_all(trainer, NAME)
        if self.plan.has_plateaus:
            check_validation(trainer, self.on_plateau)
        if self._saved is not None and self._saved["progress"]["base"]:
            check_place(trainer, NAME, self._saved["progress"]["loader_batch"], loader_batch)
            self._restore()
        else:
            (factors, *_), self._saved = self._factors, None
            base = loader_batch * trainer.accumulate_grad_batches
            self._progress = GrowthProgress(base, loader_batch, loader_batch, first_step=factors.steps)
            self._sharing.apply(self._sharing.shares(trainer.accumulate_grad_batches))
        if self.unit == "samples" or self._progress.tokens:
            self._check(trainer)
            self._sharing.take_in(self._progress.windows(self.plan), may_leave=False)
        self._is_running = True

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader_batch = loader_batch_of_all(trainer, NAME)
        if loader_batch != self._progress.loader_batch:  # loaders that are reloaded
            self._progress.loader_batch = loader_batch
            self._check(trainer)
            self._begin()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        progress = self._progress
        if self.unit == "tokens" and not progress.tokens:
            progress.samples, progress.tokens = over_replicas(trainer, count_samples(batch), count_tokens(batch))
            self._check(trainer)

    def _grow(self, trainer: Trainer) -> None:
        """Begin the level that is due, if a window of it can begin with the next batch."""
        progress, batch_idx, started = self._progress, trainer.fit_loop.batch_idx + 1, self._progress.level
        is_known = self.unit == "samples" or progress.tokens
        if batch_idx % trainer.accumulate_grad_batches or not is_known:
            return
        due = progress.grown if self.plan.has_plateaus else self.plan.reached(self._now(trainer))
        level = progress.next_level(due, lambda each: batch_idx % self._window(each) == 0)
        if level != started:
            before, progress.level = self.global_batch, level
            shares = self._begin()
            now, units = progress.at(self.plan, level), progress.units
            tell_level(trainer, batch_idx, before * units, now, shares, units, self.unit)
        if level != started or batch_idx == 0:
            self._sharing.take_in(progress.windows(self.plan))

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        log_growth(trainer, pl_module, self._factors, self.global_batch, self._progress.units)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.on_plateau is None or trainer.sanity_checking or not self._is_running:
            return
        self._progress.observe(mean_of(trainer, self.on_plateau), self.patience, self.min_delta, self.mode)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._sharing.end()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._factors.release(self)
        self._give_back()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._factors.release(self)  # accumulate_grad_batches stays, for checkpoints that are saved now
        self._sharing.on_exception(exception)
        self._is_running = False

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._saved or {STATES: self._factors.state(), "progress": self._progress.state()}

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        unknown = {STATES: states_of_any(checkpoint), "progress": GrowthProgress().state()}
        self.load_state_dict(checkpoint["callbacks"].get(self.state_key, unknown))

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._factors.keep(state_dict[STATES])
        self._saved = state_dict
        if self._is_running:  # between two batches
            self._factors.resume()
            self._restore()

    def _restore(self) -> None:
        """Go on from a state.

        Raises:
            ValueError: If it counts in another unit.
        """
        assert self._saved is not None
        state = {**self._saved["progress"], "loader_batch": self._progress.loader_batch}
        self._progress, self._saved = GrowthProgress(**state), None
        if self.level and bool(self._progress.tokens) != (self.unit == "tokens"):
            raise ValueError(
                f"BatchSizeGrowth(unit={self.unit!r}): the checkpoint is of a batch that has grown by another unit. "
                "Keep the unit."
            )
        if self.unit == "samples":
            self._progress.tokens = 0
        self._begin()

    def _check(self, trainer: Trainer) -> None:
        """Refuse levels that cannot be."""
        check_levels(self._progress, self.plan, trainer.num_training_batches)

    def _window(self, level: int) -> int:
        """Batches of the loader in a step of a level."""
        return self._progress.at(self.plan, level).batch // self._progress.loader_batch

    def _begin(self) -> Shares:
        """Have the batch and the rates of the present level."""
        shares = self._sharing.shares(self._window(self.level))
        self._sharing.apply(shares)
        rate = self._progress.at(self.plan, self.level).rate
        for factors, optimizer in zip(self._factors, self._factors.optimizers, strict=True):
            factors.set(self, rate, correct_momentum=bool(getattr(optimizer, "rate_in_momentum", False)))
        return shares

    def _now(self, trainer: Trainer) -> int:
        """Where the run is, as milestones count."""
        (factors, *_) = self._factors
        return trainer.current_epoch if self.interval == "epoch" else factors.steps - self._progress.first_step

    def _give_back(self) -> None:
        """Let the Trainer have its own accumulation."""
        self._sharing.give_back()
        self._is_running = False
