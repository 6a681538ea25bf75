"""Norms of whole tensors, and the ratios that layer-wise rates are made of."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from lightning_hybrid.compat import foreach
from lightning_hybrid.optim.base import Member
from lightning_hybrid.optim.wholes import Contribution

PIECE = 2**16  # numbers, of which a norm is right to 1e-6


def adapts(option: bool | None, shape: Sequence[int]) -> bool:
    """Whether a tensor has a rate of its own: None leaves out biases, norms and scalars."""
    return len(shape) >= 2 if option is None else option


def squared_norms(members: Sequence[Member], values: Sequence[Tensor]) -> list[Contribution]:
    """Squared 2-norms of values of the members' local parts, in float32 at least: all in one, if all are whole here."""
    dtype = torch.promote_types(values[0].dtype, torch.float32)
    pieces = [_pieces(each) for each in values]
    squared = torch.stack(foreach("norm")(list(chain(*pieces)), 2, dtype=dtype)).square()
    if len(squared) > len(members):
        squared = torch.stack([part.sum() for part in squared.split([len(each) for each in pieces])])
    if not any(member.dealings for member in members):
        return [Contribution(squared, ())]
    return [member.part(each) for member, each in zip(members, squared, strict=True)]


def _pieces(values: Tensor) -> Sequence[Tensor]:
    """What norms are taken of: torch's on CPUs of 40 million float32 numbers are 0.3 percent wrong."""
    is_long = values.numel() > PIECE and values.device.type == "cpu"
    return values.reshape(-1).split(PIECE) if is_long else (values,)


def vector_of(found: Sequence[Tensor]) -> Tensor:
    """What was found for `squared_norms`, one number for each tensor."""
    return torch.cat([each.reshape(-1) for each in found])


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
