"""What plans of recomputation are made of: what blocks take, segments of blocks, and what a plan takes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, groupby


@dataclass(frozen=True)
class BlockCost:
    """What one block of a model takes in one micro-batch.

    Attributes:
        boundary: Bytes of its inputs, which are kept where a recomputed segment begins with it.
        internal: Bytes that its operations save for backward, apart from its inputs.
        saved_inputs: Bytes of its inputs that its own operations save.
        seconds: Time of its forward.
    """

    boundary: int
    internal: int
    saved_inputs: int = 0
    seconds: float = 0.0

    @property
    def kept(self) -> int:
        """Bytes that it holds until its backward if it is not recomputed."""
        return self.internal + self.saved_inputs


@dataclass(frozen=True)
class Segment:
    """Consecutive blocks, from `start` to before `stop`: one that is kept, or some that are recomputed together."""

    start: int
    stop: int
    recomputed: bool


def peak_bytes(costs: Sequence[BlockCost], segments: Sequence[Segment], in_flight: int = 1) -> int:
    """Most bytes that a plan holds for the backward pass at once.

    Backward frees later segments first. While it is in one, there are the bytes stored of those before, and the whole
    of that one: of a recomputed segment its boundary and what its operations save when they run again.

    Args:
        costs: Of all blocks, in the order in which they run.
        segments: The plan, from the first block to the last.
        in_flight: Micro-batches whose activations are held at once, the one in backward included; 1 without a pipeline.
    """
    sums, stored, peak = Sums(costs), 0, 0
    for segment in segments:
        peak = max(peak, stored + sums.full(segment))
        stored += sums.stored(segment)
    return (in_flight - 1) * stored + peak


def extra_seconds(costs: Sequence[BlockCost], segments: Sequence[Segment]) -> float:
    """Time that a plan adds to the step of a micro-batch: forward of the blocks that it recomputes."""
    return math.fsum(block.seconds for s in segments if s.recomputed for block in costs[s.start : s.stop])


PLAN_COLUMNS = ("blocks", "activations are", "bytes until backward", "bytes in backward", "extra ms")


def plan_rows(names: Sequence[str], costs: Sequence[BlockCost], segments: Sequence[Segment]) -> list[tuple[str, ...]]:
    """What a table of a plan shows, in `PLAN_COLUMNS`: a row a recomputed segment or run of kept blocks, and totals.

    Args:
        names: Of the blocks.
        costs: Of the blocks; bytes and times are those of one micro-batch.
        segments: The plan.
    """
    sums, rows = Sums(costs), list[tuple[str, ...]]()
    for _, run in groupby(segments, key=lambda s: s.recomputed and (s.start, s.stop)):
        group = list(run)
        first, last = names[group[0].start], names[group[-1].stop - 1]
        label = first if first == last else f"{first} to {last}"
        fate = "recomputed" if group[0].recomputed else "kept"
        stored, full = sum(map(sums.stored, group)), sum(map(sums.full, group))
        rows.append((label, fate, f"{stored:,}", f"{full:,}", f"{1000 * extra_seconds(costs, group):.2f}"))
    stored, peak, time = sum(map(sums.stored, segments)), peak_bytes(costs, segments), extra_seconds(costs, segments)
    return [*rows, ("all", "", f"{stored:,}", f"{peak:,} at most", f"{1000 * time:.2f}")]


class Sums:
    """Bytes and times of runs of blocks.

    Args:
        costs: Of all blocks, in the order in which they run.
        starts: Blocks with which a segment must begin: those before do not pass on to them what they give.

    Attributes:
        costs: As given.
        time: Of all blocks before each, and behind the last, exactly, in a unit of its own: ticks.

    Raises:
        ValueError: If a cost is negative or not finite.
    """

    def __init__(self, costs: Sequence[BlockCost], starts: Collection[int] = ()) -> None:
        for block in costs:
            if min(block.boundary, block.internal, block.saved_inputs) < 0 or not 0 <= block.seconds < math.inf:
                raise ValueError(f"Costs of blocks must be finite and not negative, got {block}. Measure them again.")
        self.costs = costs
        self._ends = list[int]()  # where a segment that begins at a block ends at the latest
        for index in reversed(range(len(costs))):
            after = self._ends[-1] if self._ends else len(costs)
            self._ends.append(index + 1 if index + 1 in starts else after)
        self._ends.reverse()
        self._kept = list(accumulate((block.kept for block in costs), initial=0))
        # with rounding, the order of a sum would decide between plans that take the same time
        exact = [Fraction(block.seconds) for block in costs]
        unit = math.lcm(*(seconds.denominator for seconds in exact))
        self.time = list(accumulate((int(seconds * unit) for seconds in exact), initial=0))

    @property
    def most(self) -> int:
        """Bytes that no plan can exceed."""
        return self._kept[-1] + sum(block.boundary for block in self.costs)

    def inner(self, start: int, stop: int) -> int:
        """Bytes that a recomputed segment saves when it runs again, without its boundary."""
        return self._kept[stop] - self._kept[start] - self.costs[start].saved_inputs

    def reach(self, start: int, room: int) -> int:
        """Where a segment that begins there ends at the latest if `inner` may be `room`; at most `start` if nowhere."""
        return min(
            self._ends[start], bisect_right(self._kept, room + self._kept[start] + self.costs[start].saved_inputs) - 1
        )

    def stored(self, segment: Segment) -> int:
        """Bytes that a segment holds between its forward and its backward."""
        block = self.costs[segment.start]
        return block.boundary if segment.recomputed else block.kept

    def full(self, segment: Segment) -> int:
        """Bytes that a segment holds in its backward."""
        block = self.costs[segment.start]
        return block.boundary + self.inner(segment.start, segment.stop) if segment.recomputed else block.kept

    def ticks(self, segments: Sequence[Segment]) -> int:
        """Time of what is recomputed."""
        return sum(self.time[s.stop] - self.time[s.start] for s in segments if s.recomputed)
