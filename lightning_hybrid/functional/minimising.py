"""Searches that plans of memory share: exact, and fast for hundreds of blocks of unequal bytes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from operator import itemgetter
from typing import Any, Protocol, TypeVar

Option = tuple[int, int, bool]
"""Bytes stored behind a segment, where it ends at the latest, and of which of two kinds it is."""


def least_stored(
    num_blocks: int, options: Callable[[int, int], Iterator[Option]]
) -> tuple[list[int], list[tuple[int, int, bool]]] | None:
    """Cut a sequence of blocks into segments that store the fewest bytes.

    Args:
        num_blocks: Number of blocks.
        options: Segments that may begin at a block if so many bytes are stored before it; with fewer, all of them may.

    Returns:
        Bytes before each block and behind the last, each the fewest that any segments before it store, and the segments
        of all blocks with start, stop and kind. None if there are none.
    """
    least, origin, usable = [0], list[tuple[int, int, bool]](), list[tuple[int, int, int, bool]]()
    for start in range(num_blocks):
        for stored, stop, kind in options(start, least[start]):
            heappush(usable, (stored, start, stop, kind))
        while usable and usable[0][2] <= start:  # has ended, for all blocks from here on
            heappop(usable)
        if not usable:
            return None
        least.append(usable[0][0])
        origin.append((usable[0][1], start + 1, usable[0][3]))
    segments, stop = list[tuple[int, int, bool]](), num_blocks
    while stop:
        segments.append(origin[stop - 1])
        stop = segments[-1][0]
    return least, segments[::-1]


class Solution(Protocol):
    """What is limited, and what is to be added to it, both whole and at least 0."""

    @property
    def limited(self) -> int:
        """At most the limit."""

    @property
    def added(self) -> int:
        """The fewest under the limit."""


S = TypeVar("S", bound=Solution)


def least_sum(solve: Callable[[int], S | None], most: int, weight: int) -> S:
    """Minimise what is limited plus `weight` times what is added, and what is added among equals.

    What is added falls as the limit rises. Ranges of limits are halved, those that could hold the best first, and left
    out once they cannot: what is added is at least what it is above a range.

    Args:
        solve: Gives the solution with the least added under a limit; None if there is none.
        most: A limit under which there is one.
        weight: At least 0.
    """

    def value(solution: S) -> tuple[int, int]:
        return solution.limited + weight * solution.added, solution.added

    def push(low: int, high: int, floor: int) -> None:
        if low <= high:
            heappush(ranges, (low + weight * floor, floor, low, high))

    ranges = list[tuple[int, int, int, int]]()
    best = solve(most)
    assert best is not None
    push(0, best.limited - 1, best.added)
    while ranges and ranges[0][:2] < value(best):
        _, floor, low, high = heappop(ranges)
        middle = (low + high) // 2
        found = solve(middle)
        if found is not None:
            best = min(best, found, key=value)
            push(low, found.limited - 1, found.added)
        if found is None or found.added > floor:
            push(middle + 1, high, floor)
    return best


State = tuple[int, int, int, Any]
"""Three numbers that are better if they are smaller, and how they come about."""


def front(states: Iterable[State]) -> list[State]:
    """States that no other surpasses or equals in all three numbers, sorted by them; of equals the first."""
    kept, best = list[State](), list[tuple[int, int]]()  # best: second numbers so far that rise, with third that fall
    for state in sorted(states, key=itemgetter(0, 1, 2)):
        _, second, third, _ = state
        place = bisect_right(best, second, key=itemgetter(0))
        if place and best[place - 1][1] <= third:
            continue
        kept.append(state)
        begin = place - (place > 0 and best[place - 1][0] == second)
        end = begin
        while end < len(best) and best[end][1] >= third:
            end += 1
        best[begin:end] = [(second, third)]
    return kept
