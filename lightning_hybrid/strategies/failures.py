"""What a rank does with an exception before Lightning's hooks hear of it: who failed first, and may it be saved."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from lightning_hybrid.parallel.failures.failure import Failure, is_communication_error
from lightning_hybrid.parallel.failures.watch import Watch
from lightning_hybrid.strategies import steps

PATIENCE = 3.0  # seconds in which the rank that failed first is heard of after a line to it broke


class Saving:
    """Stands before everything that would save a checkpoint after an error: all ranks must take part in that.

    Args:
        trainer: The Trainer.
        reason: Says why nothing can be saved, or None if it can; asked when something is to be saved.
    """

    def __init__(self, trainer: Trainer, reason: Callable[[], str | None]) -> None:
        self._reason = reason
        self._guarded: list[tuple[Any, str]] = []
        self._guard(trainer, "save_checkpoint")
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, OnExceptionCheckpoint) or getattr(callback, "save_on_exception", False):
                self._guard(callback, "on_exception")

    def release(self) -> None:
        """Save again as usual."""
        for holder, name in self._guarded:
            vars(holder).pop(name, None)
        self._guarded = []

    def _guard(self, holder: Any, name: str) -> None:
        save = getattr(holder, name)

        def save_if_possible(*args: Any, **kwargs: Any) -> None:
            reason = self._reason()
            if reason is None:
                save(*args, **kwargs)
            else:
                warnings.warn(f"No checkpoint is saved on this exception: {reason}", stacklevel=2)

        vars(holder)[name] = save_if_possible
        self._guarded.append((holder, name))


def judge(watch: Watch, trainer: Trainer, error: BaseException) -> tuple[BaseException, Callable[[], str | None]]:
    """Tell the other ranks of an exception, or find out which of them failed first.

    Returns:
        What to raise, and the reason why nothing can be saved (see `Saving`).
    """
    other = watch.first(PATIENCE) if is_communication_error(error) else None
    if other is not None:
        watch.fail()
        summary = other.summary
        return RuntimeError(_upper(other.describe())), lambda: _alone(summary)
    failure = Failure.of(error, watch.rank, "" if is_inside_step(error) else _place(trainer))
    watch.report(failure)
    return error, cache(lambda: _reason(watch, failure))


def is_inside_step(error: BaseException) -> bool:
    """Whether the exception left a step that the schedule ran: ranks are then at different places of it."""
    names = (frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__))
    return steps.__name__ in names


def _reason(watch: Watch, failure: Failure) -> str | None:
    if not failure.place:
        return f"it was raised inside a step ({failure.summary}), where ranks are at different places of the schedule."
    return None if watch.together(PATIENCE) else _alone(failure.summary)


def _alone(summary: str) -> str:
    return f"{summary}. All ranks would have to take part; the last regular checkpoint stands."


def _place(trainer: Trainer) -> str:
    state, batch = trainer.state, trainer.fit_loop.batch_idx
    return f"{state.fn} {state.stage} epoch {trainer.current_epoch} step {trainer.global_step} batch {batch}"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
