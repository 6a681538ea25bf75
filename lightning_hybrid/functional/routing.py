"""Which tokens go to which experts: each router as a pure function, and what happens to tokens above the capacity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Assignment:
    """What a router has decided for T tokens and E experts: P pairs of a token and an expert.

    Attributes:
        tokens: [P], int64. Pairs are in the order in which they may take an expert's capacity.
        experts: [P], int64.
        weights: [P], by which an expert's output counts; with a gradient to the router.
        probabilities: [T, E], with a gradient: what a balance loss multiplies the fractions of tokens with.
        losses: Losses of the router itself by name ("importance", "load", "z"), scalars times their coefficients.
    """

    tokens: Tensor
    experts: Tensor
    weights: Tensor
    probabilities: Tensor
    losses: Mapping[str, Tensor] = field(default_factory=dict)
