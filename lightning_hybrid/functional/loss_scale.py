"""Loss scaling: what losses are multiplied by so that small gradients do not vanish in 16 bits, and when it changes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ScaleRule:
    """How a dynamic loss scale moves.

    Attributes:
        growth_factor: What it is multiplied by after `growth_interval` steps without overflow; above 1.
        backoff_factor: What it is multiplied by after an overflow; between 0 and 1.
        growth_interval: Steps without overflow before it grows, at least 1.
        hysteresis: Overflows that it takes to back off, at least 1. Each further one backs off too, until growth starts
            the count again.
        min_scale: Least scale; above 0.
        max_scale: Largest scale.

    Raises:
        ValueError: If a number is out of range.

    Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2; hysteresis as in Megatron-LM.
    """

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 1.0
    max_scale: float = 2.0**32

    def __post_init__(self) -> None:
        ranges = {
            "growth_factor": (1 < self.growth_factor < math.inf, "a finite number above 1"),
            "backoff_factor": (0 < self.backoff_factor < 1, "above 0 and below 1"),
            "growth_interval": (_counts(self.growth_interval), "a whole number of at least 1"),
            "hysteresis": (_counts(self.hysteresis), "a whole number of at least 1"),
            "min_scale": (self.min_scale > 0, "above 0"),
            "max_scale": (self.max_scale >= self.min_scale, f"at least min_scale={self.min_scale!r}"),
        }
        for name, (holds, wanted) in ranges.items():
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)!r} must be {wanted}.")


def _counts(number: object) -> bool:
    return type(number) is int and number >= 1


@dataclass(frozen=True)
class ScaleState:
    """Where a loss scale stands.

    Attributes:
        scale: What losses are multiplied by.
        clean_steps: Steps without overflow since it last changed, or since the last overflow.
        overflows: Overflows since it last grew.
        skipped: Steps skipped in a row.
        applied: Steps applied so far.
    """

    scale: float
    clean_steps: int = 0
    overflows: int = 0
    skipped: int = 0
    applied: int = 0


def next_scale(state: ScaleState, rule: ScaleRule | None, *, overflow: bool) -> ScaleState:
    """The state after a step; below `min_scale` there is no way on.

    Args:
        state: Before the step.
        rule: How the scale moves; None leaves it.
        overflow: The step had gradients that are not finite, and was skipped.
    """
    if not overflow:
        state = replace(state, clean_steps=state.clean_steps + 1, skipped=0, applied=state.applied + 1)
        if rule is None or state.clean_steps < rule.growth_interval:
            return state
        grown = min(state.scale * rule.growth_factor, max(rule.max_scale, state.scale))
        return replace(state, scale=grown, clean_steps=0, overflows=0)
    state = replace(state, clean_steps=0, overflows=state.overflows + 1, skipped=state.skipped + 1)
    if rule is None or state.overflows < rule.hysteresis:
        return state
    return replace(state, scale=state.scale * rule.backoff_factor)


def weight_unit(weight: float) -> float:
    """The least power of two that is not below a loss weight: to divide by it changes no digit.

    Args:
        weight: Above 0 and finite; for others the unit is 1.
    """
    if not 0 < weight < math.inf:
        return 1.0
    mantissa, exponent = math.frexp(weight)  # exact, where a logarithm rounds just above a power of two
    return math.ldexp(1.0, exponent - (mantissa == 0.5))
