"""Curves of transitions: golden values, and what holds everywhere."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.functional.transitions import (
    linear_schedule,
    linear_weight,
    literal_transition_weight,
    transition_schedule,
    transition_weight,
)


def test_the_curve_has_its_published_values():
    at = [transition_weight(i, 10, 5) for i in (0, 5, 10, 11, 12.5, 90)]
    assert at == pytest.approx([0.5 * math.exp(-4), 0.5 * math.exp(-2), 0.5, 0.7, 1.0, 1.0], abs=1e-15)
    assert transition_weight(12.5, 10, 5) == 1.0


def test_the_circulating_curve_leaves_its_range_and_falls_back():
    at = [literal_transition_weight(i, 10, 5) for i in (0, 10, 11, 12, 12.49, 12.5)]
    assert at == pytest.approx([0.5 * math.exp(-4), 0.5, 0.9, 1.3, 1.496, 1.0], abs=1e-14)


@given(st.floats(0, 1e4), st.floats(1e-3, 1e4), st.lists(st.floats(0, 1e5), min_size=2))
def test_the_curve_grows_within_its_range(center, period, positions):
    weights = [transition_weight(i, center, period) for i in sorted(positions)]
    assert weights == sorted(weights)
    assert weights[0] >= 0
    assert weights[-1] <= 1


def test_the_curve_has_one_slope_on_both_sides_of_the_center():
    step = 1e-6
    before, after = transition_weight(10 - step, 10, 5), transition_weight(10 + step, 10, 5)
    assert (0.5 - before) / step == pytest.approx((after - 0.5) / step, rel=1e-5)


def test_a_straight_line_has_its_ends():
    assert [linear_weight(i, 2, 6) for i in range(8)] == [0, 0, 0, 0.25, 0.5, 0.75, 1, 1]
    assert [linear_weight(i, 3, 3) for i in (2, 3, 4)] == [0, 1, 1]


def test_schedules_count_steps_and_refuse_what_goes_back():
    assert transition_schedule(10, 5)(11) == transition_weight(11, 10, 5)
    assert linear_schedule(2, 6)(3) == 0.25
    with pytest.raises(ValueError, match="period=0"):
        transition_schedule(10, 0)
    with pytest.raises(ValueError, match="begin=3, end=2"):
        linear_schedule(3, 2)
