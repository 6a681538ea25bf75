"""Knees of exact curves, lines through them, and the ratio of exchange to compute."""

import io
import math

import pytest

from lightning_hybrid.functional.batch_time_drawing import batch_times_png
from lightning_hybrid.functional.batch_times import BatchTimes, default_sizes, exchange_ratio

SIZES = default_sizes(100)


def knee_by_search(time, largest, tolerance):
    """The definition: the first size whose throughput is within the tolerance of the best one."""
    best = max(b / time(b) for b in range(1, largest + 1))
    return next(b for b in range(1, largest + 1) if b / time(b) >= (1 - tolerance) * best * (1 - 1e-12))


@pytest.mark.parametrize("tolerance", [0.02, 0.1, 0.5])
@pytest.mark.parametrize(("overhead", "slope"), [(8.0, 1.0), (0.5, 2.0), (0.0, 3.0), (5.0, 0.0)])
def test_knee_and_line_of_a_straight_line_are_exact(overhead, slope, tolerance):
    times = BatchTimes(SIZES, [overhead + slope * size for size in SIZES], tolerance)
    assert times.knee == knee_by_search(lambda b: overhead + slope * b, 100, tolerance)
    assert times.line == (pytest.approx(overhead, abs=1e-9), pytest.approx(slope, abs=1e-9))
    assert times.headroom == pytest.approx(overhead / (overhead + slope * 100) if slope else 1, abs=1e-9)
    assert [times.at(b) for b in (1, 3, 70, 200)] == pytest.approx([overhead + slope * b for b in (1, 3, 70, 200)])


def test_knee_of_a_line_is_where_the_equation_has_it():
    times = BatchTimes([1, 1000], [10 + 1, 10 + 1000], tolerance=0.1)
    best = 1000 / 1010
    assert times.knee == math.ceil(0.9 * best * 10 / (1 - 0.9 * best))


@pytest.mark.parametrize("turn", [8, 32])
def test_knee_of_a_floor_with_a_slope_behind_it(turn):
    """Time stays the same until the device is full, then grows with the batch."""
    times = BatchTimes(default_sizes(128), [max(turn, b) for b in default_sizes(128)], 0.25)
    assert times.knee == knee_by_search(lambda b: max(turn, b), 128, 0.25) == 3 * turn // 4


def test_sizes_that_lose_again_leave_the_knee_where_it_was():
    assert BatchTimes([1, 2, 4, 8, 16], [4.0, 4.0, 4.0, 8.0, 64.0]).knee == 4
    assert BatchTimes([4], [2.0]).knee == 4
    assert BatchTimes([4], [2.0]).at(6) == 3


def test_exchange_over_compute_is_the_rings_bytes_over_the_micro_batches_time():
    found = exchange_ratio(3_000, num_ranks=4, bandwidth=50.0, seconds=2.5, num_microbatches=6)
    assert found == 2 * (4 - 1) / 4 * 3_000 / 50.0 / (2.5 * 6)
    assert exchange_ratio(3_000, num_ranks=1, bandwidth=50.0, seconds=2.5) == 0


def test_sizes_are_powers_of_two_and_the_largest():
    assert [default_sizes(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
    assert [default_sizes(n, least=2) for n in (1, 2, 6)] == [[1], [2], [2, 4, 6]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([], []), r"sizes=\[\] must ascend"),
        (([2, 1], [1.0, 1.0]), r"sizes=\[2, 1\] must ascend"),
        (([1, 2], [1.0, 0.0]), "a positive time each"),
        (([1], [1.0], 1.0), "tolerance=1.0 must be above 0 and below 1"),
    ],
)
def test_times_that_cannot_be_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        BatchTimes(*given)


def test_picture_is_a_png():
    batch_times_png(BatchTimes([1, 2, 4], [1.0, 1.5, 2.5]), file := io.BytesIO(), knee=2)
    batch_times_png(BatchTimes([1, 2, 4], [1.0, 1.5, 2.5]), without := io.BytesIO(), knee=None)
    assert file.getvalue().startswith(b"\x89PNG")
    assert file.getvalue() != without.getvalue()
