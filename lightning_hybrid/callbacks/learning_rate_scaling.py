"""Learning rates that follow the batch size."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hybrid.callbacks.arguments import check_flag, check_whole
from lightning_hybrid.callbacks.fit_factors import STATES, FitFactors, saved_state
from lightning_hybrid.callbacks.global_batch import (
    count_samples,
    count_tokens,
    loader_batch_size,
    num_replicas,
    over_replicas,
)
from lightning_hybrid.callbacks.rate_factors import RateFactors
from lightning_hybrid.functional.rates import linear_scale, sqrt_scale

RULES: dict[str, Callable[[float], float]] = {"linear": linear_scale, "sqrt": sqrt_scale}


class LearningRateScaling(Callback):
    """Multiplies the learning rates of all optimizers by rule(global batch / reference batch).

    The global batch is that of one step: samples of a replica's batch, times the batches that are accumulated, times
    the data replicas. Ranks of a pipeline or a tensor axis share a batch, and micro-batches cut it: neither counts.
    It is the loader's `batch_size`, or that of its batch sampler, summed over the replicas. Without one, and for
    tokens, the first batch is measured, and a run that goes on keeps its measure. A smaller last batch changes nothing.

    Schedules stay as they are: the factor acts in the optimizer's update alone, see `RateFactors`. Groups keep their
    ratios. `LearningRateMonitor` shows the schedule's rate, `log` the one that steps have. What is multiplied is said
    once, on rank 0, and when it changes.

    Args:
        reference_batch_size: The global batch that the learning rate has been chosen for, in units.
        rule: "linear": the ratio; "sqrt": its square root; or a function of the ratio.
        unit: "samples"; or "tokens": elements of the first tensor of whole numbers in a batch, padding too.
        momentum_correction: Whether the optimizer's `momentum_buffer` holds the rate, v = m v + lr g, and is multiplied
            by lr[t+1] / lr[t] when the rate changes, by a schedule too. "auto": if it says so by `rate_in_momentum`, as
            `Lars` does. torch's optimizers have the rate outside.
        log: Log the rates of steps as `learning_rate/<optimizer>[-index][/group]`, every `log_every_n_steps`.

    Raises:
        ValueError: If an argument is none of these.

    Source: Goyal et al. 2017, arXiv:1706.02677, sections 2.1 and 3.2 (momentum correction).
    """

    def __init__(
        self,
        reference_batch_size: int,
        rule: Literal["linear", "sqrt"] | Callable[[float], float] = "linear",
        unit: Literal["samples", "tokens"] = "samples",
        momentum_correction: Literal["auto"] | bool = "auto",
        log: bool = True,
    ) -> None:
        check_whole("reference_batch_size", reference_batch_size, 1)
        if not callable(rule) and rule not in tuple(RULES):
            raise ValueError(f"rule={rule!r} must be 'linear', 'sqrt' or a function of the ratio of batch sizes.")
        if unit not in ("samples", "tokens"):
            raise ValueError(f"unit={unit!r} must be 'samples' or 'tokens'.")
        if momentum_correction != "auto" and not isinstance(momentum_correction, bool):
            raise ValueError(f"momentum_correction={momentum_correction!r} must be 'auto', True or False.")
        check_flag("log", log)
        self.reference_batch_size, self.unit, self.log = reference_batch_size, unit, log
        self.momentum_correction = momentum_correction
        self._rule = rule if callable(rule) else RULES[rule]
        self._rule_name = getattr(rule, "__name__", type(rule).__name__) if callable(rule) else rule
        self._factors = FitFactors()
        self._measured: dict[str, int] | None = None  # the first batch, over all replicas
        self._samples: int | None = None  # of a batch over all replicas, as the loaders say
        self._batch, self._is_set = 0.0, False

    @property
    @override
    def state_key(self) -> str:
        return f"LearningRateScaling{{{self.reference_batch_size}, {self._rule_name}, {self.unit}}}"

    @property
    def global_batch(self) -> float:
        """Units of one step over all replicas; 0 before training."""
        return self._batch

    @property
    def factor(self) -> float:
        """What the learning rates are multiplied by."""
        return self._rule(self._batch / self.reference_batch_size)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._factors.reset()
            self._measured, self._samples, self._batch, self._is_set = None, None, 0.0, False

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._factors.attach(trainer, "LearningRateScaling")
        for optimizer in self._factors.optimizers:
            _corrects(optimizer, self.momentum_correction)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._factors.resume()
        self.on_train_epoch_start(trainer, pl_module)  # which Lightning leaves out in the middle of an epoch

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        size = loader_batch_size(trainer, "LearningRateScaling")
        known, summed = over_replicas(trainer, int(size is not None), size or 0)
        self._samples = summed if known == num_replicas(trainer) else None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._measured is None and (self._samples is None or self.unit == "tokens"):
            tokens = count_tokens(batch) if self.unit == "tokens" else 0
            samples, tokens = over_replicas(trainer, count_samples(batch), tokens)
            self._measured = {"samples": samples, "tokens": tokens}
        self._settle(trainer)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
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
        measure = {"unit": self.unit, "measured": self._measured, "global_batch": self._batch}
        return {STATES: self._factors.state(), **measure}

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        state = saved_state(checkpoint, self.state_key)
        if state is not None:
            self.load_state_dict(dict(state))

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._factors.keep(state_dict[STATES])
        if state_dict["unit"] == self.unit:
            self._is_set = self._is_set and self._batch == state_dict["global_batch"]
            self._measured, self._batch = state_dict["measured"], state_dict["global_batch"]

    def _settle(self, trainer: Trainer) -> None:
        """Multiply by what belongs to the batch as it is now.

        Raises:
            ValueError: If the rule gives no factor.
        """
        measured = self._measured or {"samples": 0, "tokens": 0}
        units: float = measured["samples"] if self._samples is None else self._samples
        if self.unit == "tokens":
            units = units * measured["tokens"] / measured["samples"]
        batch = units * trainer.accumulate_grad_batches
        if batch == self._batch and self._is_set:
            return
        before, self._batch, self._is_set = self._batch, batch, True
        if not (isfinite(self.factor) and self.factor > 0):
            raise ValueError(
                f"rule={self._rule_name} gives the factor {self.factor} for a global batch of {batch:g} and "
                f"reference_batch_size={self.reference_batch_size}. It must be finite and above 0."
            )
        for optimizer in self._factors.optimizers:
            correct = _corrects(optimizer, self.momentum_correction)
            RateFactors.of(optimizer).set(self, self.factor, correct_momentum=correct)
        was = f" (before: {before:.12g})" if before not in (0, batch) else ""
        rank_zero_info(
            f"LearningRateScaling: global batch {batch:.12g} {self.unit}{was} = {units / num_replicas(trainer):.12g} x "
            f"{trainer.accumulate_grad_batches} accumulated x {num_replicas(trainer)} replicas; learning rates x "
            f"{self.factor:g} ({self._rule_name} from {self.reference_batch_size})"
        )


def _corrects(optimizer: Optimizer, correction: str | bool) -> bool:
    """Whether an optimizer's momentum is corrected.

    Raises:
        ValueError: If that is asked for where it would be wrong.
    """
    if correction == "auto":
        return bool(getattr(optimizer, "rate_in_momentum", False))
    kind = type(optimizer)
    if correction and (kind.__module__.startswith("torch.optim") or "momentum" not in optimizer.defaults):
        raise ValueError(
            f"momentum_correction=True multiplies a momentum_buffer that holds the learning rate, and {kind.__name__} "
            "has none: torch's optimizers keep the rate outside. Set momentum_correction='auto'."
        )
    return bool(correction)
