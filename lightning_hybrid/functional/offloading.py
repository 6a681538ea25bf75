"""Which groups of saved tensors go to host memory between forward and backward, under a budget of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

MOST_SUMS = 1024
"""Most sums of kept groups that a plan looks at behind each group."""


def offloaded_peak_bytes(sizes: Sequence[int], offloaded: Sequence[bool], in_flight: int = 1) -> int:
    """Most bytes of groups that a plan has on the device at once.

    While a group runs, forward or backward, there are it, the groups before it that are kept, and the one before it
    even if that is offloaded, as it is still being copied to the host or already back.

    Args:
        sizes: Bytes that each group saves, in the order in which they run.
        offloaded: Whether each group goes to host memory.
        in_flight: Micro-batches whose activations are held at once, the one that runs included; 1 without a pipeline.
    """
    kept, last, peak = 0, 0, 0
    for size, is_offloaded in zip(sizes, offloaded, strict=True):
        peak = max(peak, kept + last + size)
        kept += 0 if is_offloaded else size
        last = size if is_offloaded else 0
    return (in_flight - 1) * kept + peak


def smallest_offload_budget(sizes: Sequence[int]) -> int:
    """Fewest bytes on the device that any plan can do with, however many micro-batches are in flight.

    That is two groups in a row, of all offloaded.

    Args:
        sizes: Bytes that each group saves, in the order in which they run.
    """
    return offloaded_peak_bytes(sizes, [True] * len(sizes))


def cheapest_offload(sizes: Sequence[int], budget_bytes: int, in_flight: int = 1) -> list[bool]:
    """Move the fewest bytes to host memory, such that no more than a budget is on the device at once.

    Args:
        sizes: Bytes that each group saves, in the order in which they run: what stands before the first block, each
            block, what stands behind the last.
        budget_bytes: Most bytes on the device, of all micro-batches in flight together.
        in_flight: As in :func:`offloaded_peak_bytes`.

    Returns:
        Whether each group goes to host memory. Among plans that keep to the budget the one with the fewest bytes moved,
        then the lowest :func:`offloaded_peak_bytes`, then early groups, whose copies have the most time. It is exact
        for up to 10 groups, and for hundreds with sizes in common. With more sums of sizes than `MOST_SUMS` some are
        dropped, evenly, never the smallest: then a few bytes more than needed may be moved.

    Raises:
        ValueError: If no plan keeps to the budget (the smallest possible is named), a size is negative, or `in_flight`
            is below 1.

    Source: the aim of Rhu et al. 2016, arXiv:1602.08124, section 3, with the exact least in the place of its policies.
    """
    if in_flight < 1 or min(sizes, default=0) < 0:
        raise ValueError(f"in_flight={in_flight} must be at least 1, and sizes not negative, got {list(sizes)}.")
    needed = smallest_offload_budget(sizes)
    if needed > budget_bytes:
        raise ValueError(
            f"budget_bytes={budget_bytes}: with everything offloaded, two groups of saved tensors in a row still take "
            f"{needed} bytes on the device. Allow {needed} or more, or use smaller micro-batches."
        )
    # bytes kept of the groups so far -> the least that was left of the budget, and the plan, last group first
    states: dict[int, tuple[int, Any]] = {0: (budget_bytes, None)}
    for size, following in pairwise([*sizes, 0]):
        # what is kept of this group does not matter until the one behind the following: it is there in any case
        met = [(kept, min(left, budget_bytes - kept - size - following), plan) for kept, (left, plan) in states.items()]
        found: dict[int, tuple[int, Any]] = {}
        for is_offloaded in (True, False):
            for before, left, plan in met:
                kept = before if is_offloaded else before + size
                if left >= (in_flight - 1) * kept and (kept not in found or left >= found[kept][0]):
                    found[kept] = left, (is_offloaded, plan)
        states = {kept: found[kept] for kept in _spread(sorted(found))}
    offloaded, plan = list[bool](), states[max(states)][1]
    while plan is not None:
        offloaded.append(plan[0])
        plan = plan[1]
    return offloaded[::-1]


def _spread(sums: list[int]) -> list[int]:
    """At most `MOST_SUMS` of them, evenly, the first and the last included."""
    last = len(sums) - 1
    return sums if last < MOST_SUMS else [sums[last * i // (MOST_SUMS - 1)] for i in range(MOST_SUMS)]
