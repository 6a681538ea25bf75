"""Counts of tokens that ranks share."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def sums_over(group: dist.ProcessGroup, counts: Iterable[Tensor]) -> list[Tensor]:
    """Sums of vectors over the ranks, in one message; all ranks give as many, of the same lengths and in one order.

    Args:
        group: The ranks.
        counts: Vectors of one type, on one device.
    """
    parts = list(counts)
    whole = torch.cat(parts)
    dist.all_reduce(whole, group=group)
    return list(whole.split([len(part) for part in parts]))
