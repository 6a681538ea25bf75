"""Climbing in a box, and the sharpness that comes of it."""

from itertools import product

import pytest
import torch
from torch.testing import assert_close

from lightning_hybrid.functional.ascent import ascend, box_of, relative_box_of, sharpness


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def quadratic(hessian, x):
    """Loss and gradient of half x'Hx at x and an offset."""
    return lambda y: float((x + y[0]) @ hessian @ (x + y[0]) / 2), lambda y: [hessian @ (x + y[0])]


def test_separable_convex_loss_is_highest_in_the_corner_that_one_step_finds():
    x, curvatures = drawn(7), drawn(7, seed=1).square()
    x[3] = curvatures[5] = 0.0  # at its minimum in one coordinate, constant in another
    (box,) = box_of([x], 0.1)
    found = ascend(*quadratic(curvatures.diag(), x), [box], steps=10)
    expected = [float((curvatures * (x.abs() + by).square()).sum()) / 2 for by in (0, box)]
    assert found.losses == pytest.approx(expected, rel=1e-12)
    assert_close(found.offset[0].abs(), box, rtol=0, atol=0)


def test_convex_loss_rises_from_corner_to_corner_and_not_above_the_highest():
    root, x, box = drawn(8, 8), drawn(8, seed=1) / 10, drawn(8, seed=2).abs()
    loss, gradient = quadratic(root @ root.T, x)
    found = ascend(loss, gradient, [box], steps=20)
    corners = [loss([torch.tensor(signs, dtype=torch.float64) * box]) for signs in product((-1, 1), repeat=8)]
    assert found.losses == sorted(set(found.losses))
    assert len(found.losses) > 2
    assert any(found.losses[-1] == pytest.approx(corner) for corner in corners)
    assert found.losses[-1] <= max(corners) * (1 + 1e-12)
    goal = gradient(found.offset)[0].sign() * box
    assert_close(found.offset[0], goal)  # no neighbouring corner is higher in the gradient's direction


def test_steps_past_a_maximum_inside_the_box_are_halved():
    goal = torch.tensor([0.3, -0.7], dtype=torch.float64)
    box = torch.ones(2, dtype=torch.float64)
    found = ascend(lambda y: -float((y[0] - goal).square().sum()), lambda y: [2 * (goal - y[0])], [box], steps=50)
    assert found.losses == sorted(found.losses)
    assert -0.02 < found.losses[-1] <= 0


def test_steps_end_in_the_loss_that_is_not_finite_and_where_nothing_rises():
    box = [torch.ones(1)]
    overflown = ascend(lambda y: float("inf") if y[0] > 0 else 1.0, lambda y: [torch.ones(1)], box, steps=5)
    assert overflown.losses == [1.0, float("inf")]
    flat = ascend(lambda y: 2.0, lambda y: [torch.zeros(1)], box, steps=5)
    assert (flat.losses, flat.offset) == ([2.0], [torch.zeros(1)])


def test_boxes_and_measure_are_those_of_the_equations():
    x = torch.tensor([-2.0, 0.0, 0.5])
    assert_close(box_of([x], 0.1)[0], torch.tensor([0.3, 0.1, 0.15]))
    assert_close(relative_box_of([x], 0.1)[0], torch.tensor([0.2, 0.0, 0.05]))
    assert sharpness(0.25, 0.75) == 40
    assert sharpness(-0.5, 0) == 100
    with pytest.raises(ValueError, match=r"The loss is -1.5, .* Measure a loss that is above -1"):
        sharpness(-1.5, 3)
