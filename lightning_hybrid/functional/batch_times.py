"""Time of a micro-batch by its size: overhead, knee, and what the exchange of gradients adds."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_hybrid.functional.traffic import ring_bytes


@dataclass(frozen=True)
class BatchTimes:
    """Measured times, with straight lines between them.

    Args:
        sizes: Samples of a micro-batch, ascending.
        seconds: Of its forward and backward, one a size.
        tolerance: Share of the best throughput that does not matter.

    Raises:
        ValueError: If sizes do not ascend from 1 or more, times are not positive, or the tolerance is no share.
    """

    sizes: Sequence[int]
    seconds: Sequence[float]
    tolerance: float = 0.1

    def __post_init__(self) -> None:
        ascending = len(self.sizes) > 0 and self.sizes[0] >= 1 and all(a < b for a, b in pairwise(self.sizes))
        if not ascending or len(self.sizes) != len(self.seconds) or not min(self.seconds) > 0:
            raise ValueError(f"sizes={list(self.sizes)} must ascend, with a positive time each: {list(self.seconds)}.")
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance={self.tolerance} must be above 0 and below 1.")

    @property
    def rates(self) -> list[float]:
        """Samples a second at each size."""
        return [size / seconds for size, seconds in zip(self.sizes, self.seconds, strict=True)]

    @property
    def line(self) -> tuple[float, float]:
        """(a, c) of t(b) = a + c b, seconds and seconds a sample, by least squares of relative errors."""
        return fit_line(self.sizes, self.seconds)

    @property
    def knee(self) -> int:
        """Fewest samples with which the throughput b / t(b) is within the tolerance of the best that was measured."""
        level, before = (1 - self.tolerance) * max(self.rates), None
        for size, seconds in zip(self.sizes, self.seconds, strict=True):
            if size / seconds >= level:
                return size if before is None else _crossing(before, (size, seconds), level)
            before = size, seconds
        raise AssertionError("the best size is as good as itself")

    @property
    def headroom(self) -> float:
        """Share of the throughput of endless batches that the line says the largest size lacks: a / (a + c b)."""
        overhead, slope = self.line
        overhead = max(overhead, 0.0)
        return overhead / (overhead + slope * self.sizes[-1]) if slope > 0 else 1.0

    def at(self, size: float) -> float:
        """Seconds of a micro-batch: on the straight line between its neighbours, or on that to the nearest size."""
        if len(self.sizes) == 1:
            return self.seconds[0] * size / self.sizes[0]
        right = min(max(bisect_left(self.sizes, size), 1), len(self.sizes) - 1)
        (b0, b1), (t0, t1) = self.sizes[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        return t0 + (t1 - t0) * (size - b0) / (b1 - b0)


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Give (a, c) that minimise the sum of ((a + c b - t) / t) squared; through the origin for one size."""
    if len(sizes) == 1:
        return 0.0, seconds[0] / sizes[0]
    weights = [1 / time**2 for time in seconds]
    total = math.fsum(weights)
    size = math.fsum(w * b for w, b in zip(weights, sizes, strict=True)) / total
    time = math.fsum(w * t for w, t in zip(weights, seconds, strict=True)) / total
    rows = list(zip(weights, sizes, seconds, strict=True))
    slope = math.fsum(w * (b - size) * (t - time) for w, b, t in rows) / math.fsum(
        w * (b - size) ** 2 for w, b, _ in rows
    )
    return time - slope * size, slope


def exchange_ratio(
    num_bytes: int, *, num_ranks: int, bandwidth: float, seconds: float, num_microbatches: int = 1
) -> float:
    """Give the time of a sum of gradients over that of a step's micro-batches: 2 (N - 1) / N S / B over K t(b).

    Args:
        num_bytes: Of all gradients, S.
        num_ranks: Replicas, N.
        bandwidth: Bytes a second that a rank sends, B.
        seconds: Of a micro-batch, t(b).
        num_microbatches: Of a step, on each replica, K.
    """
    return ring_bytes("all_reduce", num_bytes, num_ranks) / bandwidth / (num_microbatches * seconds)


def default_sizes(largest: int, least: int = 1) -> list[int]:
    """Powers of two from the least, itself one, up to the largest, and the largest itself."""
    return sorted({*(2**power for power in range(least.bit_length() - 1, largest.bit_length())), largest})


def _crossing(before: tuple[int, float], after: tuple[int, float], level: float) -> int:
    """Fewest samples between two sizes, the first apart, whose throughput on the line is at least the level."""
    (b0, t0), (b1, t1) = before, after
    slope = (t1 - t0) / (b1 - b0)
    exact = level * (t0 - slope * b0) / (1 - level * slope)
    return min(b1, math.ceil(exact - 1e-9 * b1))  # rounding alone makes no whole sample
