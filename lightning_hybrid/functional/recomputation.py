"""Which blocks drop what they save for the backward pass and run forward again in it: plans by bytes and time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from lightning_hybrid.functional.minimising import Option, State, front, least_stored, least_sum, thinned
from lightning_hybrid.functional.segments import BlockCost, Segment, Sums, peak_bytes

STEPS = 4_000_000
"""Most steps from state to state of a plan under a budget, about; a million takes about a second."""


def square_root_segments(costs: Sequence[BlockCost], starts: Collection[int] = ()) -> list[Segment]:
    """Recompute all blocks, in segments that together need the fewest bytes, exactly, whatever the blocks' costs.

    Bytes are the sum of the segments' boundaries and the most that the blocks of one segment save, without its
    boundary. For `l` equal blocks whose operations do not save their inputs that is the least of
    ``k * boundary + ceil(l / k) * internal`` over `k`, near ``2 * sqrt(l * boundary * internal)``. The last segment is
    then a longest one, and as backward begins with it, this is :func:`peak_bytes`, which it bounds for unequal blocks.

    Args:
        costs: Of all blocks, in the order in which they run.
        starts: Blocks with which a segment must begin.

    Returns:
        The segments. Among those with the fewest bytes: fewest bytes of boundaries, then fewest segments, then the
        smallest sum of squared lengths, then short ones first.

    Raises:
        ValueError: If a cost is negative or not finite.

    Source: Chen et al. 2016, arXiv:1604.06174, sections 3 and 4, with exact segments in the place of its search.
    """
    sums = Sums(costs, starts)

    def solve(longest: int) -> _Solution | None:
        def options(start: int, stored: int) -> Iterator[Option]:
            yield stored + costs[start].boundary, sums.reach(start, longest), True

        found = least_stored(len(costs), options)
        if found is None:
            return None
        return _Solution(max((sums.inner(start, stop) for start, stop, _ in found[1]), default=0), found[0][-1])

    return _most_even(sums, least_sum(solve, sums.most, weight=1).limited)


def smallest_budget(costs: Sequence[BlockCost], in_flight: int = 1, starts: Collection[int] = ()) -> int:
    """Fewest bytes that any plan can do with, exactly.

    Args:
        costs: Of all blocks, in the order in which they run.
        in_flight: As in :func:`peak_bytes`.
        starts: Blocks with which a segment must begin.

    Raises:
        ValueError: If a cost is negative or not finite, or `in_flight` is below 1.
    """
    return peak_bytes(costs, _smallest_plan(Sums(costs, starts), in_flight), in_flight)


def cheapest_segments(
    costs: Sequence[BlockCost], budget_bytes: int, in_flight: int = 1, starts: Collection[int] = ()
) -> list[Segment]:
    """Recompute what takes the least time, such that no more than a budget is held at once.

    Args:
        costs: Of all blocks, in the order in which they run.
        budget_bytes: Most bytes, of all micro-batches in flight together.
        in_flight: As in :func:`peak_bytes`.
        starts: Blocks with which a segment must begin.

    Returns:
        The plan with the least :func:`extra_seconds` among those whose :func:`peak_bytes` keep to the budget, with the
        fewest bytes among equals. It is exact as long as few states are left that no other surpasses in bytes and time:
        always for a dozen blocks, and for hundreds of equal ones. Where there are more, some are dropped, evenly
        between the one with the fewest bytes and the one with the most: then the plan may take longer than the best,
        but there is one whenever one is possible, and it keeps to the budget.

    Raises:
        ValueError: If no plan keeps to the budget (the smallest possible is named), a cost is negative or not finite,
            or `in_flight` is below 1.
    """
    sums = Sums(costs, starts)
    smallest = _smallest_plan(sums, in_flight)
    needed = peak_bytes(costs, smallest, in_flight)
    if needed > budget_bytes:
        raise ValueError(
            f"budget_bytes={budget_bytes}: the activations of {len(costs)} blocks, with {in_flight} micro-batch(es) in "
            f"flight, take at least {needed} bytes, whatever is recomputed. Allow {needed} or more, or use smaller "
            f"micro-batches."
        )
    plans = [*_search(sums, budget_bytes, in_flight), smallest]
    return min(plans, key=lambda segments: (sums.ticks(segments), peak_bytes(costs, segments, in_flight)))


@dataclass(frozen=True)
class _Solution:
    limited: int
    added: int
    segments: list[Segment] = field(default_factory=list)


def _most_even(sums: Sums, longest: int) -> list[Segment]:
    """Fewest bytes of boundaries, segments and squared lengths if no segment is longer, then short ones first."""
    num_blocks = len(sums.costs)
    best, ends = [(0, 0, 0)], [num_blocks]  # of suffixes, the shortest first
    for start in reversed(range(num_blocks)):
        boundary, values = sums.costs[start].boundary, list[tuple[tuple[int, int, int], int]]()
        for stop in range(start + 1, sums.reach(start, longest) + 1):
            stored, segments, squares = best[num_blocks - stop]
            values.append(((stored + boundary, segments + 1, squares + (stop - start) ** 2), stop))
        value, end = min(values)
        best.append(value)
        ends.append(end)
    found, start = list[Segment](), 0
    while start < num_blocks:
        found.append(Segment(start, ends[num_blocks - start], True))
        start = found[-1].stop
    return found


def _smallest_plan(sums: Sums, in_flight: int) -> list[Segment]:
    """A plan with the fewest bytes."""
    if in_flight < 1:
        raise ValueError(f"in_flight={in_flight}: at least one micro-batch is under way.")

    def solve(limit: int) -> _Solution | None:
        found = least_stored(len(sums.costs), partial(_within, sums, limit))
        if found is None:
            return None
        segments = [Segment(*segment) for segment in found[1]]
        return _Solution(peak_bytes(sums.costs, segments), found[0][-1], segments)

    return least_sum(solve, sums.most, weight=in_flight - 1).segments


def _within(sums: Sums, limit: int, start: int, stored: int) -> Iterator[Option]:
    """Segments that begin at a block such that no more than a limit is held in their backward."""
    block = sums.costs[start]
    if stored + block.kept <= limit:
        yield stored + block.kept, start + 1, False
    stop = sums.reach(start, limit - stored - block.boundary)
    if stop > start:
        yield stored + block.boundary, stop, True


def _search(sums: Sums, budget: int, in_flight: int) -> list[list[Segment]]:
    """The plan with the least time, then the fewest bytes, if it was not dropped on the way.

    States are plans of the last blocks: time, bytes stored (0 if only one micro-batch is in flight, where they do not
    matter), and peak. In front of one goes any plan that keeps to the budget, at best the one that stores the least:
    what exceeds the budget with that is left out. With one micro-batch in flight, everything else can be completed.
    """
    before = least_stored(len(sums.costs), partial(_within, sums, budget))
    assert before is not None
    others, num_blocks = in_flight - 1, len(sums.costs)

    def held(state: State) -> int:
        return others * state[1] + state[2]

    most = max(16, STEPS // max(1, num_blocks) ** 2)
    fronts: list[Sequence[State]] = [[(0, 0, 0, None)]]  # of suffixes, the shortest first
    for start in reversed(range(num_blocks)):
        room = budget - in_flight * before[0][start]
        states = list[State]()
        for segment in _segments(sums, start, room):
            stored, full, ticks = sums.stored(segment), sums.full(segment), sums.ticks([segment])
            later, more = fronts[num_blocks - segment.stop], stored if others else 0
            added = [(s[0] + ticks, s[1] + more, max(full, s[2] + stored), (segment, s)) for s in later]
            states += [state for state in added if held(state) <= room]
        fronts.append(thinned(sorted(front(states), key=held), most))
    best = sorted(fronts[-1], key=lambda state: (state[0], held(state)))[:1]
    return [_segments_of(state) for state in best]


def _segments(sums: Sums, start: int, room: int) -> Iterator[Segment]:
    """Segments that begin at a block and fit into so many bytes."""
    if sums.costs[start].kept <= room:
        yield Segment(start, start + 1, False)
    for stop in range(sums.reach(start, room - sums.costs[start].boundary), start, -1):
        yield Segment(start, stop, True)


def _segments_of(state: State) -> list[Segment]:
    segments, link = list[Segment](), state[3]
    while link is not None:
        segments.append(link[0])
        link = link[1][3]
    return segments
