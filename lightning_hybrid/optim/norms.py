"""Norms of whole tensors, and the ratios that layer-wise rates are made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_hybrid.compat import foreach
from lightning_hybrid.optim.base import Member
from lightning_hybrid.optim.wholes import Contribution


def adapts(option: bool | None, shape: Sequence[int]) -> bool:
    """Whether a tensor has a rate of its own: None leaves out biases, norms and scalars."""
    return len(shape) >= 2 if option is None else option


def squared_norms(members: Sequence[Member], values: Sequence[Tensor]) -> list[Contribution]:
    """Squared 2-norms of values of the members' local parts, in float32 at least."""
    dtype = torch.promote_types(values[0].dtype, torch.float32)
    norms = foreach("norm")(list(values), 2, dtype=dtype)
    return [member.part(squared) for member, squared in zip(members, torch.stack(norms).square(), strict=True)]


def norms_of(squared: Sequence[Tensor]) -> Tensor:
    """Norms as one vector, of sums of squares."""
    return torch.stack(list(squared)).sqrt()


def trust(numerators: Tensor, denominators: Tensor, coefficient: float, limit: float | None, *, live: Tensor) -> Tensor:
    """Trust ratios, with 1 where one of the norms is 0: nothing can be said of the tensor's scale then.

    Args:
        numerators: Norms of the weights.
        denominators: What they are divided by.
        coefficient: Factor.
        limit: The largest ratio; None for any.
        live: The other norms that must not be 0.
    """
    ratios = coefficient * numerators / denominators
    ratios = ratios if limit is None else ratios.clamp(max=limit)
    return torch.where((numerators == 0) | (live == 0), 1.0, ratios)
