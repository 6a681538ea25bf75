import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_hybrid.functional.loss_scale import ScaleRule, ScaleState, next_scale, weight_unit

# rule, what happened at each step (o: overflow), scale after it
TABLE = {
    "grows after clean steps": (ScaleRule(growth_interval=2), "....", [8, 16, 16, 32]),
    "backs off at once": (ScaleRule(growth_interval=2), ".o..", [8, 4, 4, 8]),
    "an overflow starts the count of clean steps again": (ScaleRule(growth_interval=3), "..o...", [8, 8, 4, 4, 4, 8]),
    "waits for a second overflow": (ScaleRule(growth_interval=9, hysteresis=2), "o.o.oo", [8, 8, 4, 4, 2, 1]),
    "growth forgives": (ScaleRule(growth_interval=2, hysteresis=2), "oo..oo", [8, 4, 4, 8, 8, 4]),
    "other factors": (ScaleRule(growth_factor=4.0, backoff_factor=0.25, growth_interval=1), ".oo", [32, 8, 2]),
    "falls under its minimum, where somebody must notice": (ScaleRule(min_scale=4.0), "oo", [4, 2]),
    "does not grow past its maximum": (ScaleRule(growth_interval=1, max_scale=20.0), "..", [16, 20]),
    "stays above a maximum": (ScaleRule(growth_interval=1, max_scale=4.0), ".", [8]),
    "static": (None, ".o..", [8, 8, 8, 8]),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_scale_moves_as_the_table_says(name):
    rule, steps, expected = TABLE[name]
    state, found = ScaleState(8.0), []
    for step in steps:
        state = next_scale(state, rule, overflow=step == "o")
        found.append(state.scale)
    assert found == expected
    assert state.applied == steps.count(".")
    assert state.skipped == len(steps) - len(steps.rstrip("o"))


@given(steps=st.lists(st.booleans(), max_size=60), interval=st.integers(1, 5), hysteresis=st.integers(1, 3))
def test_the_scale_stays_a_power_of_two_and_counts_every_step(steps, interval, hysteresis):
    rule, state = ScaleRule(growth_interval=interval, hysteresis=hysteresis), ScaleState(2.0**16)
    for overflow in steps:
        before, state = state, next_scale(state, rule, overflow=overflow)
        assert math.frexp(state.scale)[0] == 0.5
        assert state.scale <= before.scale if overflow else state.scale >= before.scale
        assert state.clean_steps < interval
        assert state.scale == before.scale or not overflow or state.overflows >= hysteresis
    assert state.applied == steps.count(False)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("growth_factor", 1.0, "a finite number above 1"),
        ("growth_factor", math.inf, "a finite number above 1"),
        ("backoff_factor", 0.0, "above 0 and below 1"),
        ("backoff_factor", 1.0, "above 0 and below 1"),
        ("growth_interval", 0, "a whole number of at least 1"),
        ("growth_interval", 1.5, "a whole number of at least 1"),
        ("hysteresis", 0, "a whole number of at least 1"),
        ("min_scale", 0.0, "above 0"),
        ("min_scale", math.nan, "above 0"),
        ("max_scale", 0.5, "at least min_scale=1.0"),
    ],
)
def test_the_number_out_of_range_is_refused_with_its_range(name, value, wanted):
    with pytest.raises(ValueError, match=f"^{name}={value} must be {wanted}.$"):
        ScaleRule(**{name: value})


@given(weight=st.floats(2.0**-100, 2.0**100))
@example(weight=math.nextafter(2.0**-100, 1.0))
@example(weight=4.0)
def test_a_weight_divided_by_its_unit_is_at_most_one_and_as_exact(weight):
    unit = weight_unit(weight)
    assert 0.5 < weight / unit <= 1
    assert weight / unit * unit == weight


def test_no_weight_has_the_unit_one():
    assert [weight_unit(weight) for weight in (0.0, -1.0, math.inf, math.nan)] == [1.0] * 4
