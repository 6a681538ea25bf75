"""Checks of options."""

from __future__ import annotations

import math

from torch import Tensor


def check_at_least(owner: object, least: float, **options: float | Tensor | None) -> None:
    """Refuse numbers that are lower, or no numbers; None is left alone.

    Raises:
        ValueError: Naming the option.
    """
    for name, value in options.items():
        if value is not None and not least <= float(value) < math.inf:
            raise ValueError(f"{type(owner).__name__}({name}={value!r}) must be a finite number of at least {least}.")


def check_fraction(owner: object, **options: float) -> None:
    """Refuse what is not from 0 to below 1.

    Raises:
        ValueError: Naming the option.
    """
    for name, value in options.items():
        if not 0 <= value < 1:
            raise ValueError(f"{type(owner).__name__}({name}={value!r}) must be from 0 to below 1.")
