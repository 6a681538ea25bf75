"""Optimizers that forget what they have accumulated, at chosen steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from math import isfinite
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_hybrid.callbacks.applied_steps import AppliedSteps
from lightning_hybrid.callbacks.arguments import check_whole
from lightning_hybrid.callbacks.rate_factors import RateFactors
from lightning_hybrid.callbacks.reports import is_logging_step
from lightning_hybrid.functional.rates import warmup_progress, warmup_value
from lightning_hybrid.functional.restarts import cycle_of
from lightning_hybrid.optim.restarting import (
    check_together,
    entries_of,
    forget_all,
    forget_entries,
    made_by_constructor,
)


class OptimizerRestart(Callback):
    """Clears what optimizers have accumulated, with any optimizer of torch's kind, and any strategy but DeepSpeed's.

    An optimizer restarts before the step that follows on the moment that is asked for. Without `every`, `at` and `when`
    that is the end of each cycle of its `CosineAnnealingWarmRestarts`. Each optimizer counts its own applied steps; one
    that is skipped because of an overflow does not count. Every `log_every_n_steps` the number of restarts so far is
    logged as `restarts`.

    Args:
        every: Restart after each so many applied steps.
        at: Restart after these numbers of applied steps.
        when: Asked before each step, with the Trainer and the LightningModule: whether to restart. If any rank says so,
            all do.
        keys: Names of entries of the state, such as "exp_avg", that begin anew, as zeros or whatever a new optimizer
            begins with. None clears everything: the next step is that of a new optimizer with the present groups.
        rewarm: Applied steps over which learning rates grow again after each restart, from 0, or (steps, factor) to
            begin with a factor from 0 to 1 of the rate. It multiplies the schedule's rate, and leaves the schedule
            alone; None does nothing.

    Attributes:
        restarts: Number of restarts so far, of all optimizers.

    Raises:
        ValueError: If more than one of `every`, `at` and `when` is given, or an argument is outside its range.

    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5, for the cycles, in which they leave the optimizer
        alone; O'Donoghue and Candes 2012, arXiv:1204.3982, section 3, for momentum that begins anew.
    """

    def __init__(
        self,
        every: int | None = None,
        at: Sequence[int] | None = None,
        when: Callable[[Trainer, LightningModule], bool] | None = None,
        keys: Sequence[str] | None = None,
        rewarm: int | tuple[int, float] | None = None,
    ) -> None:
        given = [name for name, value in (("every", every), ("at", at), ("when", when)) if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given. Keep one of them; none is the ends of cosine's cycles.")
        if every is not None:
            check_whole("every", every, 1, " of steps")
        if at is not None and (isinstance(at, str) or not isinstance(at, Collection) or not at):
            raise ValueError(f"at={at!r} must be a list of numbers of steps, such as [1000, 3000].")
        for step in at or ():
            check_whole("each number in at", step, 1, " of steps")
        if when is not None and not callable(when):
            raise ValueError(f"when={when!r} must be a function of the Trainer and the LightningModule.")
        if keys is not None and not _are_names(keys):
            raise ValueError(f"keys={keys!r} must be a list of names, such as ['exp_avg']; None clears everything.")
        self.every, self.at, self.when = every, None if at is None else frozenset(at), when
        self.keys = None if keys is None else frozenset(keys)
        self.rewarm = None if rewarm is None else _checked_rewarm(rewarm)
        self.restarts = 0
        self._applied = AppliedSteps()
        self._handles: list[RemovableHandle] = []
        self._factors: list[RateFactors] = []
        self._saved: dict[str, Any] | None = None
        self._last: list[int | None] = []  # of each optimizer, the steps that it had applied when it last restarted
        self._cycles: list[int | None] = []  # and the cycle that its schedule was in
        self._made: list[list[dict[str, Any]]] = []
        self._late = set[int]()  # optimizers that restart when a checkpoint's states have come
        self._is_checked = set[int]()  # optimizers whose states have been compared with the keys
        self._has_told = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._stop()
            self._applied.reset()
            self._saved, self._has_told, self.restarts = None, False, 0
            self._last, self._cycles = [], []

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        optimizers = trainer.optimizers
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise ValueError(
                f"OptimizerRestart cannot work under {type(trainer.strategy).__name__}: DeepSpeed keeps states in flat "
                "buffers of its own. Use strategy='hybrid_ptdp' with zero_stage=1, 2 or 3."
            )
        if not optimizers:
            raise ValueError("configure_optimizers has returned no optimizer that OptimizerRestart could restart.")
        if self._follows_cycles and not _cosines(trainer):
            raise ValueError(
                "OptimizerRestart() follows the cycles of CosineAnnealingWarmRestarts, and configure_optimizers has "
                "returned none (one within a SequentialLR does not count: warm up with LearningRateWarmup). Return "
                "one, or give every, at or when."
            )
        for optimizer in optimizers:
            check_together(optimizer, self.keys or ())
        self._made = [made_by_constructor(each) if self.keys is None else [] for each in optimizers]
        self._factors = [RateFactors.of(each) for each in optimizers] if self.rewarm is not None else []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        number = len(trainer.optimizers)
        check = partial(self._check_keys, trainer) if self.keys is not None else None
        self._applied.start(trainer.optimizers, type(self).__name__, check)
        self._late, self._is_checked = set(), set()
        self._last, self._cycles = [None] * number, self._cycles_now(trainer)
        saved, self._saved = self._saved, None
        if saved is not None:
            self._go_on(saved)
        for index, optimizer in enumerate(trainer.optimizers):
            if self.rewarm is None:
                before = partial(self._before_step, trainer, pl_module, index)
                self._handles.append(optimizer.register_step_pre_hook(lambda *_, before=before: before()))
        for index, factors in enumerate(self._factors):
            factors.set(self, partial(self._factor, trainer, pl_module, index))

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        number = trainer.optimizers.index(optimizer)
        if number in self._late:
            self._late.remove(number)
            self._forget(optimizer, number)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if is_logging_step(trainer):
            pl_module.log("restarts", float(self.restarts), batch_size=1)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.restarts and self.when is None:
            rank_zero_info(f"OptimizerRestart has cleared nothing: {max(self._applied.counts)} steps were applied.")

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._saved is not None:
            return self._saved
        own = {"last": list(self._last), "cycles": list(self._cycles), "restarts": self.restarts}
        return {"steps": self._applied.state(), **own}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._applied.restore(state_dict["steps"])
        if self._applied.runs:
            self._late = set()
            self._go_on(state_dict)
        else:
            self._saved = state_dict

    def _go_on(self, saved: dict[str, Any]) -> None:
        if saved["last"]:
            self._last, self._cycles, self.restarts = list(saved["last"]), list(saved["cycles"]), saved["restarts"]

    @property
    def _follows_cycles(self) -> bool:
        return self.every is None and self.at is None and self.when is None

    def _factor(self, trainer: Trainer, pl_module: LightningModule, number: int, _: int) -> float:
        """What the rates of a step are multiplied by, when it is about to begin; a restart comes before it."""
        self._before_step(trainer, pl_module, number)
        last = self._last[number]
        if last is None or self.rewarm is None:
            return 1.0
        steps, start = self.rewarm
        return warmup_value(start, 1.0, warmup_progress(self._applied.counts[number] - last, steps))

    def _before_step(self, trainer: Trainer, pl_module: LightningModule, number: int) -> None:
        if not self._is_due(trainer, pl_module, number):
            return
        optimizer, steps = trainer.optimizers[number], self._applied.counts[number]
        if getattr(trainer.strategy, "awaits_optimizer_states", False):
            self._late.add(number)
        else:
            self._forget(optimizer, number)
        self._last[number] = steps
        self.restarts += 1
        if not self._has_told:
            self._has_told = True
            what = "everything" if self.keys is None else ", ".join(sorted(self.keys))
            rank_zero_info(f"OptimizerRestart clears {what} of {type(optimizer).__name__} after {steps} applied steps.")

    def _forget(self, optimizer: Optimizer, number: int) -> None:
        if self.keys is None:
            forget_all(optimizer, self._made[number])
        else:
            forget_entries(optimizer, self.keys)

    def _is_due(self, trainer: Trainer, pl_module: LightningModule, number: int) -> bool:
        if self.when is not None:
            return bool(trainer.strategy.reduce_boolean_decision(bool(self.when(trainer, pl_module)), all=False))
        steps = self._applied.counts[number]
        if self._follows_cycles:
            before, self._cycles[number] = self._cycles[number], self._cycles_now(trainer)[number]
            return before != self._cycles[number]
        asked = steps in self.at if self.at is not None else steps > 0 and steps % (self.every or 1) == 0
        return asked and self._last[number] != steps

    def _cycles_now(self, trainer: Trainer) -> list[int | None]:
        """Of each optimizer, the cycle that its schedule is in; None without such a schedule."""
        by_optimizer = {id(cosine.optimizer): cosine for cosine in reversed(_cosines(trainer))}
        found = [by_optimizer.get(id(optimizer)) for optimizer in trainer.optimizers]
        return [None if each is None else cycle_of(each.last_epoch, each.T_0, each.T_mult) for each in found]

    def _check_keys(self, trainer: Trainer, number: int) -> None:
        """Refuse keys that no rank has, when the first step of a fit has made all states."""
        if number in self._is_checked:
            return
        self._is_checked.add(number)
        assert self.keys is not None
        optimizer = trainer.optimizers[number]
        here = entries_of(optimizer)
        for key in sorted(self.keys):
            if not trainer.strategy.reduce_boolean_decision(key in here, all=False):
                raise ValueError(
                    f"OptimizerRestart(keys={sorted(self.keys)}): {type(optimizer).__name__} keeps no {key!r}, but "
                    f"{sorted(here)}. Name some of these, or leave keys out to clear everything."
                )

    def _stop(self) -> None:
        self._applied.stop()
        for handle in self._handles:
            handle.remove()
        for factors in self._factors:
            factors.give_back()
            factors.remove(self)
        self._handles, self._factors = [], []


def _are_names(keys: Any) -> bool:
    is_many = isinstance(keys, Collection) and not isinstance(keys, str) and len(keys) > 0
    return is_many and all(isinstance(key, str) for key in keys)


def _cosines(trainer: Trainer) -> list[CosineAnnealingWarmRestarts]:
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    return [each for each in schedulers if isinstance(each, CosineAnnealingWarmRestarts)]


def _checked_rewarm(rewarm: Any) -> tuple[int, float]:
    pair = tuple(rewarm) if isinstance(rewarm, tuple | list) else (rewarm, 0.0)
    if len(pair) != 2:
        raise ValueError(f"rewarm={rewarm!r} must be a number of steps, or (steps, factor).")
    steps, factor = pair
    check_whole("rewarm's number", steps, 1, " of steps")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not (isfinite(factor) and 0 <= factor <= 1):
        raise ValueError(f"rewarm={rewarm!r} must begin with a factor from 0 to 1.")
    return steps, float(factor)
