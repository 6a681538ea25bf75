"""Which blocks drop what they save for the backward pass and run forward again in it: plans by bytes and time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from lightning_hybrid.functional.minimising import Option, State, front, least_stored, least_sum
from lightning_hybrid.functional.segments import BlockCost, Segment, Sums, peak_bytes

MOST_STATES = (8, 64, 512, 4096)
"""Most states before each block in the search for a plan under a budget; the next number is for when there are more."""
STEPS = 4_000_000
"""Most steps from state to state in a search with more than the first number; a million takes about a second."""


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
        fewest bytes among equals. It is exact as long as few states are left that no other surpasses in bytes and time,
        and that could still be better than a plan at hand: for some 60 blocks, or some hundred if they are equal. Where
        there are more, the least promising are dropped, never the one with the fewest bytes: the plan may then take a
        little longer than the best, but there is one whenever one is possible, and it keeps to the budget.

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
    return _improved(sums, smallest, budget_bytes, in_flight)


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


def _improved(sums: Sums, plan: list[Segment], budget: int, in_flight: int) -> list[Segment]:
    """The best plan under a budget, given one that keeps to it: searched with more and more states."""
    bound = _Bound(sums, budget, in_flight)
    for most in MOST_STATES:
        if most > MOST_STATES[0] and most * len(sums.costs) ** 2 > STEPS:
            break
        found, complete = _search(sums, budget, in_flight, most, partial(bound, shortest=sums.ticks(plan)))
        plan = min([*found, plan], key=lambda p: (sums.ticks(p), peak_bytes(sums.costs, p, in_flight)))
        if complete:
            break
    return plan


def _search(
    sums: Sums, budget: int, in_flight: int, most: int, excess: Callable[[int, int, int], int]
) -> tuple[list[list[Segment]], bool]:
    """The plan with the least time, then the fewest bytes, if it is not dropped; and whether no state had to be.

    States are plans of the last blocks: time, bytes stored (0 if only one micro-batch is in flight, where they do not
    matter), and peak. In front of one goes any plan that keeps to the budget, at best the one that stores the least:
    what exceeds the budget with that is left out. With one micro-batch in flight, everything else can be completed.
    """
    before = least_stored(len(sums.costs), partial(_within, sums, budget))
    assert before is not None
    others, num_blocks, complete = in_flight - 1, len(sums.costs), True

    def held(state: State) -> int:
        return others * state[1] + state[2]

    fronts: list[list[State]] = [[(0, 0, 0, None)]]  # of suffixes, the shortest first
    for start in reversed(range(num_blocks)):
        room = budget - in_flight * before[0][start]
        states = list[State]()
        for segment in _segments(sums, start, room):
            stored, full, ticks = sums.stored(segment), sums.full(segment), sums.ticks([segment])
            later, more = fronts[num_blocks - segment.stop], stored if others else 0
            added = [(s[0] + ticks, s[1] + more, max(full, s[2] + stored), (segment, s)) for s in later]
            states += [s for s in added if held(s) <= room and excess(start, s[0], held(s)) <= 0]
        fronts.append(front(states))
        if len(fronts[-1]) > most:
            complete = False
            promising = sorted(fronts[-1], key=lambda s: excess(start, s[0], held(s)))[: most - 1]
            fronts[-1] = [*promising, min(fronts[-1], key=held)]
    best = sorted(fronts[-1], key=lambda state: (state[0], held(state)))[:1]
    return [_segments_of(state) for state in best], complete


class _Bound:
    """By how much a state's plan takes longer than another plan, whatever goes in front of it: at least.

    Where bytes have a price in time, the cheapest plan of the first blocks is quickly found. Without a price it would
    save the bytes' price at most. The price is that at which a plan of all blocks stores about the budget: a Lagrange
    multiplier.

    Args:
        sums: Of all blocks.
        budget: Most bytes.
        in_flight: Micro-batches in flight.
    """

    def __init__(self, sums: Sums, budget: int, in_flight: int) -> None:
        self._sums, self._budget, self._in_flight = sums, budget, in_flight
        self._unit = max(1, sums.most)  # prices are whole, in parts of a tick
        low, high = 1, 2 + sums.time[-1] * self._unit
        while high - low > 1 + low // 100:
            middle = max(low + 1, math.isqrt(low * high))
            segments = self._cheapest(middle)[1]
            if in_flight * sum(sums.stored(Segment(*segment)) for segment in segments) > budget:
                low = middle
            else:
                high = middle
        self._price, self._least = high, self._cheapest(high)[0]

    def __call__(self, start: int, ticks: int, held: int, shortest: int) -> int:
        """The excess, in a unit of its own.

        Args:
            start: First block of the state's plan.
            ticks: Its time.
            held: Bytes of it and of the micro-batches in flight, without what goes in front of it.
            shortest: Time of the other plan.
        """
        time = self._unit * (ticks + self._sums.time[start] - shortest) + self._least[start]
        return self._in_flight * time - self._price * (self._budget - held)

    def _cheapest(self, price: int) -> tuple[list[int], list[tuple[int, int, bool]]]:
        """Before each block, the time and price of the cheapest plan, less that of recomputing all; and the plan."""

        def options(start: int, paid: int) -> Iterator[Option]:
            block, ticks = self._sums.costs[start], self._sums.time[start + 1] - self._sums.time[start]
            yield paid + price * block.kept - self._unit * ticks, start + 1, False
            yield paid + price * block.boundary, self._sums.reach(start, self._budget - block.boundary), True

        found = least_stored(len(self._sums.costs), options)
        assert found is not None
        return found


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
