"""Equations of K-FAC against literal transcriptions with dense Kronecker products."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lightning_hybrid.functional.kfac import (
    averaging,
    clipping_factor,
    deal_out,
    decomposed,
    inverted,
    precondition,
    split_damping,
)
from lightning_hybrid.functional.stepwise import check_stepwise, value_at

COLUMNS, ROWS = 5, 3


def factor(size, seed, *, diagonal=False):
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(size, size - 1, generator=generator, dtype=torch.float64)  # singular
    return (root @ root.T).diagonal().clone() if diagonal else root @ root.T


def dense(matrix):
    return torch.diag(matrix) if matrix.ndim == 1 else matrix


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("damping", [1e-3, 0.1, 10.0])
def test_natural_gradients_solve_the_damped_systems(diagonal, damping):
    a, g = factor(COLUMNS, 1, diagonal=diagonal), factor(ROWS, 2)
    gradient = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    vector = gradient.T.flatten()  # columns one below the other, as A (x) G takes them
    fisher = torch.kron(dense(a), g) + damping * torch.eye(ROWS * COLUMNS, dtype=torch.float64)
    found = precondition(gradient, decomposed(a, damping), decomposed(g, damping), damping)
    assert_close(found.T.flatten(), torch.linalg.solve(fisher, vector), rtol=1e-9, atol=1e-12)

    pi = math.sqrt(float(dense(a).trace() / COLUMNS) / float(g.trace() / ROWS))
    shifts = split_damping(a, g, damping)
    assert shifts == pytest.approx((pi * math.sqrt(damping), math.sqrt(damping) / pi), rel=1e-12)
    damped = [
        dense(each) + shift * torch.eye(len(each), dtype=torch.float64)
        for each, shift in zip((a, g), shifts, strict=True)
    ]
    found = precondition(gradient, inverted(a, shifts[0]), inverted(g, shifts[1]), None)
    assert_close(found.T.flatten(), torch.linalg.solve(torch.kron(*damped), vector), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", [inverted, decomposed])
def test_what_is_not_positive_definite_has_no_inverse(make):
    whole = torch.eye(3) - 1.5 * torch.ones(3, 3) / 3  # eigenvalues 1, 1, -0.5
    assert make(whole, 0.4) is None
    assert make(whole, 0.6) is not None
    assert make(torch.tensor([1.0, -0.5]), 0.4) is None
    assert make(torch.tensor([1.0, -0.5]), 0.6) is not None
    assert make(torch.full((2, 2), torch.nan), 1.0) is None


def test_damping_is_split_evenly_where_a_factor_is_nothing():
    zeros, ones = torch.zeros(2, 2), torch.eye(3)
    for pair in ((zeros, ones), (ones, zeros), (torch.full((2, 2), torch.inf), ones)):
        assert split_damping(*pair, 0.09) == pytest.approx((0.3, 0.3), rel=1e-12)


def test_running_means_begin_as_plain_ones():
    values, mean = [3.0, 5.0, 1.0, 7.0], 0.0
    for count, value in enumerate(values, 1):
        past = averaging(count, 0.95)
        mean = past * mean + (1 - past) * value
    assert mean == pytest.approx(sum(values) / 4, rel=1e-12)
    assert averaging(100, 0.95) == 0.95
    assert averaging(20, 0.95) == pytest.approx(0.95, rel=1e-15)


def test_steps_are_shortened_to_the_largest_change():
    assert clipping_factor(4.0, 1.0) == 0.5
    assert [clipping_factor(value, 1.0) for value in (1.0, 0.5, 0.0, -1.0)] == [1.0] * 4
    assert clipping_factor(4.0, None) == 1.0
    assert clipping_factor(math.nan, 1.0) == 1.0


@given(st.lists(st.floats(0, 1e6), max_size=30), st.integers(1, 8))
def test_each_task_has_one_worker_and_none_has_much_more_than_its_share(costs, number):
    owners = deal_out(costs, number)
    assert len(owners) == len(costs)
    assert set(owners) <= set(range(number))
    loads = [sum(c for c, owner in zip(costs, owners, strict=True) if owner == worker) for worker in range(number)]
    least = max([sum(costs) / number, *costs, 0.0])  # no dealing out is better
    assert (
        max(loads)
        <= (4 / 3) * max(least, *[sum(sorted(costs)[-number - 1 :][:2]) if len(costs) > number else 0.0]) + 1e-6
    )


def test_values_by_step():
    assert [value_at({0: 0.3, 5: 0.1}, step) for step in (0, 4, 5, 99)] == [0.3, 0.3, 0.1, 0.1]
    assert value_at(0.2, 7) == 0.2
    assert value_at(lambda step: step + 1, 7) == 8
    for name, good in (("damping", {0: 1, 3: 0.5}), ("damping", 1e-8), ("damping", lambda step: 1.0)):
        check_stepwise(name, good, whole=False)
    for bad in (0, -1.0, math.inf, True, "1", {3: 1.0}, {0: 0.0}, {0: 1.0, -2: 1.0}, {0: 1.0, 1.5: 1.0}, None):
        with pytest.raises(ValueError, match="damping="):
            check_stepwise("damping", bad, whole=False)
    with pytest.raises(ValueError, match=r"every=2.0 must be a whole number of at least 1"):
        check_stepwise("every", 2.0, whole=True)
