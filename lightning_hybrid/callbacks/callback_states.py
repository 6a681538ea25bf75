"""States of callbacks, kept and put back while a fit goes on."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Checkpoint,
    ProgressBar,
    StochasticWeightAveraging,
    Timer,
)

from lightning_hybrid.functional.trees import flatten
from lightning_hybrid.parallel.pipeline.frozen import Frozen
from lightning_hybrid.parallel.pipeline.snapshot import ModuleState

STAY = (Checkpoint, ProgressBar, Timer, BaseFinetuning, StochasticWeightAveraging)
"""Kinds that do not go back.

Checkpoints describe files that are there, and progress bars and Timer the time that has passed. Finetuning and
stochastic weight averaging act between epochs alone, and their states are for the beginning of a fit. EarlyStopping
goes back, and WeightAveraging too, whose average, which is not in its state, `RunSnapshot` keeps.
GradientAccumulationScheduler, ThroughputMonitor, and monitors of rates and devices have no state.
"""

Kept = list[tuple[Callback, dict[str, Any]]]


def kept_states(trainer: Trainer) -> Kept:
    """Copies of what callbacks would save; those that set `goes_back = False` are left out.

    A callback whose ranks have parts of its state keeps what its `own_state` gives, which its `put_back` takes.

    Args:
        trainer: Between two batches of `fit`.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    going_back = (c for c in callbacks if not isinstance(c, STAY) and getattr(c, "goes_back", True))
    return [(callback, deepcopy(getattr(callback, "own_state", callback.state_dict)())) for callback in going_back]


def leave_batch(trainer: Trainer) -> None:
    """Let callbacks leave a batch that an exception has ended, and after which `fit` goes on.

    Those that do something from `on_train_batch_start` to `on_train_batch_end`, which is not called then, have a method
    of this name, with the Trainer as its argument. All of them leave before one of them begins another batch.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        leave = getattr(callback, "leave_batch", None)
        if leave is not None:
            leave(trainer)


def put_back(kept: Kept) -> None:
    """Give callbacks what they had, by `put_back` or `load_state_dict`; no other hook is called.

    Raises:
        RuntimeError: If one had nothing to save, and does not take that back.
    """
    for callback, state in kept:
        if state:
            getattr(callback, "put_back", callback.load_state_dict)(deepcopy(state))
        elif callback.state_dict():
            _empty(callback)


def _empty(callback: Callback) -> None:
    try:
        callback.load_state_dict({})
    except Exception as error:
        raise RuntimeError(
            f"DivergenceRollback: {type(callback).__name__}.state_dict() was empty at the snapshot that the run goes "
            f"back to, and its load_state_dict({{}}) fails: {error!r}. Let it take an empty state, save all of it from "
            "the beginning on, or set goes_back = False in the class, with which it stays as it is."
        ) from error


class OverValidation:
    """What a validation within an accumulation window has changed in callbacks, and in attributes of the module.

    The window may have to be left out, and the validation stays.

    Args:
        trainer: Where the validation begins.
        pl_module: Its module.
    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trainer, self._module = trainer, pl_module
        self._before, self._module_before = kept_states(trainer), ModuleState(pl_module)
        self._changed: Kept = []
        self._attributes: dict[str, Any] = {}
        self._has_ended = False

    def end(self) -> None:
        """It has ended, for all callbacks; heard once."""
        if self._has_ended:
            return
        self._has_ended = True
        pairs = zip(self._before, kept_states(self._trainer), strict=True)
        self._changed = [after for before, after in pairs if _differ(before[1], after[1])]
        self._attributes = deepcopy(dict(self._module_before.changed(self._module)))

    def put_back(self) -> None:
        """Let it have been, after the run has gone back to before it."""
        put_back(self._changed)
        vars(self._module).update(deepcopy(self._attributes))


def _differ(before: Any, after: Any) -> bool:
    (old, of_old), (new, of_new) = flatten(before), flatten(after)
    return of_old != of_new or any(Frozen(a).differs(b) for a, b in zip(old, new, strict=True))
