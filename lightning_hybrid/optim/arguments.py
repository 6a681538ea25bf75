"""Checks of options."""

from __future__ import annotations

import math

import torch
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


def check_range(owner: object, dtype: torch.dtype) -> None:
    """Refuse float16, in which squares of ordinary gradients are 0.

    Raises:
        RuntimeError: Saying what to do.
    """
    if dtype == torch.float16:
        raise RuntimeError(
            f"{type(owner).__name__} got parameters in torch.float16, where squares of gradients below 1e-4 are 0 and "
            "those above 256 infinite. Keep the parameters in float32, as "
            'HybridPTDPStrategy does with Trainer(precision="16-true").'
        )
