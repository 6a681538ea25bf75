"""Values that change with the steps of a training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from numbers import Integral, Real

Stepwise = float | Mapping[int, float] | Callable[[int], float]
"""A value, values by the step from which they hold, or a function of the step."""

StepwiseWhole = int | Mapping[int, int] | Callable[[int], int]
"""The same of whole numbers, which stay so in configurations."""


def value_at(schedule: Stepwise, step: int) -> float:
    """The value of a step, counted from 0.

    Args:
        schedule: What it is taken from; of a mapping the entry of the last step that has come.
        step: The step.
    """
    if callable(schedule):
        return schedule(step)
    if isinstance(schedule, Mapping):
        return schedule[max(since for since in schedule if since <= step)]
    return schedule


def checked_value(name: str, schedule: Stepwise, step: int, *, whole: bool) -> float:
    """The same, above 0, as a function may not have given.

    Args:
        name: Of the argument, for the error.
        schedule: What it is taken from.
        step: The step.
        whole: It must be a whole number.

    Raises:
        ValueError: With the step and the value.
    """
    value = value_at(schedule, step)
    if not is_positive(value, whole=whole):
        raise ValueError(f"{name} gives {value!r} for step {step}, and must give {_kind(whole)}.")
    return value


def check_stepwise(name: str, schedule: object, *, whole: bool) -> None:
    """Refuse what is neither a value above 0, nor such values by steps from 0 on, nor a function that begins so.

    Args:
        name: Of the argument, for the error.
        schedule: What a user gave.
        whole: Values must be whole numbers.

    Raises:
        ValueError: With the argument's name and value.
    """
    if callable(schedule):
        checked_value(name, schedule, 0, whole=whole)
        return
    values = list(schedule.values()) if isinstance(schedule, Mapping) else [schedule]
    steps = list(schedule) if isinstance(schedule, Mapping) else [0]
    good_steps = 0 in steps and all(isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in steps)
    if good_steps and all(is_positive(value, whole=whole) for value in values):
        return
    raise ValueError(
        f"{name}={schedule!r} must be {_kind(whole)}, or such values by the step from which they hold, the first of "
        "which is 0, or a function of the step."
    )


def is_positive(value: object, *, whole: bool) -> bool:
    """Whether a value is a finite number above 0, and a whole one if it must."""
    if isinstance(value, bool) or not isinstance(value, Real) or (whole and not isinstance(value, Integral)):
        return False
    return isfinite(value) and float(value) > 0


def _kind(whole: bool) -> str:
    return "a whole number of at least 1" if whole else "a finite number above 0"
