"""States of callbacks, kept and put back while a fit goes on."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Checkpoint,
    ProgressBar,
    StochasticWeightAveraging,
    Timer,
)

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
    states = ((callback, getattr(callback, "own_state", callback.state_dict)()) for callback in going_back)
    return [(callback, deepcopy(state)) for callback, state in states if state]


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
    """Give callbacks what they had, by `put_back` or `load_state_dict`; no other hook is called."""
    for callback, state in kept:
        getattr(callback, "put_back", callback.load_state_dict)(deepcopy(state))
