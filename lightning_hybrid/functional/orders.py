"""Positions in the order of a dataset that replicas share out, as numbers: no loader, no process."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import torch
from torch import Tensor


def share_of(order: range | Tensor, replicas: int, rank: int, *, drop_last: bool = False) -> Sequence[int]:
    """What one of several replicas gets of an order, as `torch.utils.data.DistributedSampler` deals it out.

    Args:
        order: Numbers of the samples, ``[N]``.
        replicas: Those that share; each gets equally many.
        rank: Of this one.
        drop_last: Leave the last samples out if they do not go round, instead of repeating the first ones.

    Returns:
        The samples at the places `rank`, `rank + replicas` and so on.
    """
    length = len(order)
    if length % replicas:
        total = (length // replicas if drop_last else ceil(length / replicas)) * replicas
        numbers = order if isinstance(order, Tensor) else torch.tensor(order)
        order = numbers[torch.arange(total) % length]
    part = order[rank::replicas]
    return part.tolist() if isinstance(part, Tensor) else part


def batches_of_pass(number: int, length: int, *, cycles: bool) -> int:
    """Batches that a loader has given in its present pass, after `number` steps of several loaders together.

    Args:
        number: Batches of the epoch so far.
        length: Batches of a pass of the loader.
        cycles: Whether it begins anew when it ends before the others.

    Returns:
        0 to `length`; `length` at the end of a pass, for as long as nobody asks for another batch.
    """
    if number <= length or length == 0:
        return min(number, length)
    return (number - 1) % length + 1 if cycles else length


def batches_after(samples: int, batch: int) -> int | None:
    """How many batches of all replicas make up so many samples; None if they end within a batch."""
    return None if samples % batch else samples // batch
