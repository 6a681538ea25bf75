"""Learning rates that rise at the start of training, whatever schedule they have."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hybrid.callbacks.arguments import check_flag, check_whole
from lightning_hybrid.callbacks.fit_factors import STATES, FitFactors, saved_state, states_of_any
from lightning_hybrid.callbacks.global_batch import count_samples, over_replicas
from lightning_hybrid.callbacks.rate_factors import RateFactors
from lightning_hybrid.functional.rates import steps_of_epochs, warmup_progress, warmup_value


class LearningRateWarmup(Callback):
    """Multiplies the learning rates of all optimizers by a factor that rises from `start_factor` to 1 in a line.

    Step k, from 0, of a warm-up of K steps has the factor of `torch.optim.lr_scheduler.LinearLR`::

        start_factor + (1 - start_factor) k / K   for k < K, and 1 from step K on

    Schedules stay as they are, recursive ones too: the factor acts in the optimizer's update alone, see `RateFactors`.
    Groups keep their ratios. Steps that a loss scaler skips do not count. Each optimizer counts its own. A run that
    goes on from a checkpoint is where it was; after the warm-up nothing is touched. `LearningRateMonitor` shows the
    schedule's rate, `log` the one that steps have.

    Args:
        steps: Length in applied steps of an optimizer.
        epochs: Length in epochs, perhaps a fraction, which is rounded to steps.
        samples: Length in samples over all replicas: progress is that of the samples of all steps before, of which the
            last of an epoch may have fewer. Give one of the three.
        start_factor: Factor of the first step, from 0 to 1.
        momentum: Where momentum, or the first of `betas`, starts, from where it goes to the group's own in the same
            way; None leaves it alone.
        log: Log the rates of steps as `learning_rate/<optimizer>[-index][/group]`, every `log_every_n_steps`.

    Raises:
        ValueError: If an argument is outside its range, or there is not one length.

    Source: Goyal et al. 2017, arXiv:1706.02677, section 2.2, gradual warmup.
    """

    def __init__(
        self,
        steps: int | None = None,
        epochs: float | None = None,
        samples: int | None = None,
        start_factor: float = 0.0,
        momentum: float | None = None,
        log: bool = True,
    ) -> None:
        lengths = {name: n for name, n in (("steps", steps), ("epochs", epochs), ("samples", samples)) if n is not None}
        if len(lengths) != 1:
            raise ValueError(
                f"Give one of steps, epochs and samples as the length of the warm-up, not {lengths or 'none'}."
            )
        for name, value in lengths.items():
            if name != "epochs":
                check_whole(name, value, 1)
        if epochs is not None and not (_is_number(epochs) and epochs > 0):
            raise ValueError(f"epochs={epochs!r} must be a finite number above 0.")
        if not (_is_number(start_factor) and 0 <= start_factor <= 1):
            raise ValueError(f"start_factor={start_factor!r} must be from 0 to 1.")
        if momentum is not None and not (_is_number(momentum) and 0 <= momentum < 1):
            raise ValueError(f"momentum={momentum!r} must be from 0 to below 1, or None.")
        check_flag("log", log)
        self.steps, self.epochs, self.samples = steps, epochs, samples
        self.start_factor, self.momentum, self.log = start_factor, momentum, log
        self._factors = FitFactors()
        self._counts: list[_Counts] = []
        self._saved: list[dict[str, Any]] | None = None

    @property
    @override
    def state_key(self) -> str:
        lengths = (("steps", self.steps), ("epochs", self.epochs), ("samples", self.samples))
        length = next(f"{length} {unit}" for unit, length in lengths if length is not None)
        return f"LearningRateWarmup{{{length}, {self.start_factor}, {self.momentum}}}"

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._factors.reset()
            self._saved = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._factors.attach(trainer, "LearningRateWarmup"):
            self._counts = []
        if self.momentum is not None:
            for optimizer in self._factors.optimizers:
                _check_momentum(optimizer)
        if self.epochs is not None and not pl_module.automatic_optimization:
            raise ValueError(
                f"LearningRateWarmup(epochs={self.epochs}) cannot know how many steps an epoch has where the "
                "LightningModule optimizes manually. Give steps, or samples."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._factors.resume()
        total = self.samples if self.samples is not None else self._num_steps(trainer)
        if self._saved is not None:
            self._counts, self._saved = [_Counts(**count) for count in self._saved], None
        self._counts = self._counts or [_Counts(factors.steps, factors.steps) for factors in self._factors]
        for factors, count in zip(self._factors, self._counts, strict=True):
            self._set(factors, total, count)
        if self.samples is None and pl_module.automatic_optimization:
            self._compare(trainer, total)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.samples is not None and any(count.applied < self.samples for count in self._counts):
            (number,) = over_replicas(trainer, count_samples(batch))
            for count in self._counts:
                count.begin(number)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._counts[self._factors.index(optimizer)].attempt()

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        for factors, count in zip(self._factors, self._counts, strict=True):
            count.settle(factors.steps)
        if self.log:
            self._factors.log(trainer, pl_module)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._factors.release(self)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._factors.release(self)

    @override
    def state_dict(self) -> dict[str, Any]:
        states = self._factors.state()
        counts = [asdict(count) for count in self._counts if states] if self._saved is None else self._saved
        return {STATES: states, "samples": counts}

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        state = saved_state(checkpoint, self.state_key)
        self.load_state_dict(dict(state or {STATES: states_of_any(checkpoint), "samples": []}))

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._factors.keep(state_dict[STATES])
        if not self._factors.runs:
            self._saved = state_dict["samples"]
            return
        for count, saved in zip(self._counts, state_dict["samples"], strict=True):
            vars(count).update(saved)  # factors have the objects

    def _set(self, factors: RateFactors, total: int, count: _Counts) -> None:
        """Give an optimizer's rates their factor, by its steps or its samples."""

        def progress(step: int) -> float:
            return warmup_progress(step - count.first if self.samples is None else count.applied, total)

        def momentum(step: int, own: float) -> float:
            assert self.momentum is not None
            return warmup_value(self.momentum, own, progress(step))

        factors.set(
            self,
            lambda step: warmup_value(self.start_factor, 1.0, progress(step)),
            momentum=momentum if self.momentum is not None else None,
        )

    def _compare(self, trainer: Trainer, total: int) -> None:
        """Tell of a warm-up that is longer than the whole fit, as one is with steps in the place of epochs."""
        lengths = [trainer.max_steps] if trainer.max_steps >= 0 else []
        if (trainer.max_epochs or 0) > 0 and isfinite(trainer.num_training_batches):
            lengths.append(_steps_of(trainer, trainer.max_epochs or 0))
        if lengths and min(lengths) < total:
            rank_zero_info(
                f"LearningRateWarmup: {total} steps of warm-up are more than the {min(lengths)} of this fit, in "
                "which no step has the schedule's whole rate"
            )

    def _num_steps(self, trainer: Trainer) -> int:
        """Length in steps.

        Raises:
            ValueError: If it is given in epochs, and nobody knows how long an epoch is.
        """
        if self.epochs is None:
            assert self.steps is not None
            return self.steps
        if not isfinite(trainer.num_training_batches):
            raise ValueError(
                f"LearningRateWarmup(epochs={self.epochs}) needs to know how many batches an epoch has, and the "
                "training loader has no length. Set limit_train_batches, or give steps or samples."
            )
        return _steps_of(trainer, self.epochs)


@dataclass
class _Counts:
    """Where the warm-up of one optimizer is.

    Attributes:
        first: Applied steps of the optimizer when the warm-up began.
        steps: Those when samples were counted.
        applied: Samples of applied steps since the warm-up began, over all replicas.
        window: Samples of batches since the last step.
        batch: Those of the batch under way, which a run that fails in it has again when it goes on.
        is_attempted: Whether a step has begun in that batch.
    """

    first: int
    steps: int
    applied: int = 0
    window: int = 0
    batch: int = 0
    is_attempted: bool = False

    def begin(self, number: int) -> None:
        """A batch of so many samples begins."""
        self.batch, self.is_attempted = number, False

    def attempt(self) -> None:
        """A step begins."""
        self.is_attempted = True

    def settle(self, steps: int) -> None:
        """A batch has ended: count the samples of a step that has been applied, and drop those of one that has not."""
        self.window, self.batch = self.window + self.batch, 0
        if steps > self.steps:  # be it with Lightning's hooks, or in a module's own hands
            self.applied += self.window
        if steps > self.steps or self.is_attempted:
            self.window = 0
        self.steps = steps


def _steps_of(trainer: Trainer, epochs: float) -> int:
    """Steps of the first epochs, each of `num_training_batches`."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    schedulers = [each for each in callbacks if isinstance(each, GradientAccumulationScheduler)]
    accumulate = schedulers[-1].get_accumulate_grad_batches if schedulers else lambda _: trainer.accumulate_grad_batches
    return steps_of_epochs(epochs, int(trainer.num_training_batches), accumulate)


def _check_momentum(optimizer: Optimizer) -> None:
    for index, group in enumerate(optimizer.param_groups):
        if "betas" not in group and not group.get("momentum"):
            raise ValueError(
                f"Group {index} of {type(optimizer).__name__} has neither betas nor a momentum above 0, towards which "
                "LearningRateWarmup(momentum=...) could go. Set the optimizer's momentum, or leave the argument out."
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
