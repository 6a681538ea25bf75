"""The estimates against the paper's equations, and against expectations that are enumerated."""

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.functional.noise_scale import (
    BatchCosts,
    GradientSums,
    Moments,
    batch_costs,
    estimate,
    noise_scale,
)

numbers = st.floats(0.1, 10)


@given(small=numbers, big=numbers, size=st.integers(1, 9), count=st.integers(2, 9))
def test_equal_parts_give_the_two_estimates_of_the_paper(small, big, size, count):
    b_big, b_small = size * count, size
    signal = (b_big * big - b_small * small) / (b_big - b_small)  # appendix A.1, for |G|^2
    noise = (small - big) / (1 / b_small - 1 / b_big)  # and for tr(Sigma)
    found = estimate(GradientSums.of([(small, size, 1 / count)] * count), big)
    assert found == pytest.approx(Moments(noise, signal), rel=1e-9, abs=1e-9)


@given(parts=st.lists(st.tuples(st.integers(1, 9), numbers), min_size=2, max_size=5), mean=numbers, deviation=numbers)
def test_estimates_are_unbiased_for_any_sizes_and_weights(parts, mean, deviation):
    """The mean over all signs of parts ``mean +- deviation / sqrt(b)``, which have a sample's variance over ``b``."""
    found = []
    for signs in product((-1, 1), repeat=len(parts)):
        gradients = [mean + sign * deviation / math.sqrt(b) for sign, (b, _) in zip(signs, parts, strict=True)]
        rows = [(g * g, b, w) for g, (b, w) in zip(gradients, parts, strict=True)]
        whole = sum(w * g for g, (_, w) in zip(gradients, parts, strict=True))
        found.append(estimate(GradientSums.of(rows), whole**2))
    averages = [sum(column) / len(found) for column in zip(*found, strict=True)]
    assert averages == pytest.approx([deviation**2, mean**2], rel=1e-6, abs=1e-9)


@given(rows=st.lists(st.tuples(numbers, numbers, numbers), min_size=2, max_size=6), at=st.integers(1, 5))
def test_sums_of_parts_add_up_and_those_without_weight_do_not_count(rows, at):
    halves = GradientSums.of(rows[:at]).plus(GradientSums.of([*rows[at:], (5.0, 0.0, 0.0)]))
    assert halves == pytest.approx(GradientSums.of(rows))


@pytest.mark.parametrize("rows", [[], [(1.0, 2.0, 1.0)], [(1.0, 2.0, 1.0), (1.0, 2.0, 0.0)]])
def test_one_gradient_has_no_noise_to_be_seen(rows):
    with pytest.raises(ValueError, match="it takes at least two"):
        estimate(GradientSums.of(rows), 1.0)


def test_scale_is_a_ratio_and_says_when_there_is_none():
    assert noise_scale(Moments(6.0, 2.0)) == 3
    assert noise_scale(Moments(-1e-20, 2.0)) == 0  # rounding
    assert noise_scale(Moments(6.0, -0.1)) == math.inf
    assert math.isnan(noise_scale(Moments(0.0, 0.0)))
    assert math.isnan(noise_scale(Moments(math.nan, math.nan)))


@given(batch=numbers, scale=numbers)
def test_steps_and_samples_are_a_trade(batch, scale):
    costs = batch_costs(batch, scale)
    assert (costs.steps - 1) * (costs.samples - 1) == pytest.approx(1)
    assert batch_costs(scale, scale) == BatchCosts(2, 2)


@pytest.mark.parametrize("given", [(0, 1), (1, 0), (1, math.nan)])
def test_costs_of_nothing_are_refused(given):
    with pytest.raises(ValueError, match="must be above 0"):
        batch_costs(*given)
