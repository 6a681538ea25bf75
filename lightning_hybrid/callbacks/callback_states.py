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
"""Kinds that do not go back: checkpoints describe files, time goes on, and the others act between epochs alone."""

Kept = list[tuple[Callback, dict[str, Any]]]


def kept_states(trainer: Trainer) -> Kept:
    """Copies of what callbacks would save; those that set `goes_back = False` are left out.

    Args:
        trainer: Between two batches of `fit`.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    going_back = (c for c in callbacks if not isinstance(c, STAY) and getattr(c, "goes_back", True))
    states = ((callback, callback.state_dict()) for callback in going_back)
    return [(callback, deepcopy(state)) for callback, state in states if state]


def put_back(kept: Kept) -> None:
    """Give callbacks what they had, by `load_state_dict`; no other hook is called."""
    for callback, state in kept:
        callback.load_state_dict(deepcopy(state))
