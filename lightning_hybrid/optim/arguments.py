"""Checks of options."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def check_at_least(owner: object, least: float, **options: float | Tensor) -> None:
    """Refuse numbers that are lower, and what is no number.

    Raises:
        ValueError: Naming the option.
    """
    for name, value in options.items():
        if not (isinstance(value, int | float | Tensor) and least <= float(value) < math.inf):
            raise ValueError(f"{type(owner).__name__}({name}={value!r}) must be a finite number of at least {least}.")


def check_pair(owner: object, **options: tuple[float, float]) -> None:
    """Refuse what is not two numbers.

    Raises:
        ValueError: Naming the option.
    """
    for name, value in options.items():
        is_pair = isinstance(value, tuple | list) and len(value) == 2
        if not (is_pair and all(isinstance(each, int | float) for each in value)):
            raise ValueError(f"{type(owner).__name__}({name}={value!r}) must be two numbers.")


def check_layerwise(owner: object, adapt: bool | None, max_trust_ratio: float | None) -> None:
    """Refuse options of rates for each tensor that cannot be meant.

    Raises:
        ValueError: Naming the option.
    """
    if adapt not in (None, True, False):
        raise ValueError(f"{type(owner).__name__}(adapt={adapt!r}) must be True, False or None.")
    if max_trust_ratio is not None:
        check_at_least(owner, 0, max_trust_ratio=max_trust_ratio)


def check_fraction(owner: object, **options: float) -> None:
    """Refuse what is not from 0 to below 1.

    Raises:
        ValueError: Naming the option.
    """
    for name, value in options.items():
        if not (isinstance(value, int | float) and 0 <= value < 1):
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
