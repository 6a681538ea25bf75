"""Cycles of learning rates that restart."""

from __future__ import annotations


def cycle_of(epoch: int, first: int, factor: int) -> int:
    """Number of the cycle that an epoch lies in, from 0.

    Args:
        epoch: From 0; the unit is that of the schedule.
        first: Length of the first cycle, T_0, at least 1.
        factor: Length of a cycle in that of the one before, T_mult, at least 1.

    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, section 3: T_i grows by T_mult at each restart, when T_cur of
        equation 5 is 0 again. `torch.optim.lr_scheduler.CosineAnnealingWarmRestarts` does not count its cycles.
    """
    if factor == 1:
        return epoch // first
    cycle, end, length = 0, first, first
    while epoch >= end:
        length *= factor
        cycle, end = cycle + 1, end + length
    return cycle
