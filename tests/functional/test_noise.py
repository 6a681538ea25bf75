"""Noise that is drawn in blocks: any part of a tensor gets its part of the whole's, and all of it is normal."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.functional import noise
from lightning_hybrid.functional.boxes import Box
from lightning_hybrid.functional.noise import add_noise, draw, noise_deviation

CPU = torch.device("cpu")
KEY = (0, "blocks.0.weight", 3)
BOUND = 5  # standard errors: a right estimate is outside in one of 1.7 million cases


def whole_noise(shape, key=KEY, dtype=torch.float32, block=noise.BLOCK, deviation=1.0):
    target = torch.zeros(shape, dtype=dtype)
    add_noise(target, shape, Box.of(shape), deviation, key, block=block)
    return target


@pytest.mark.parametrize("eta", [0.01, 0.3, 1.0])
def test_variance_falls_as_the_equation_says(eta):
    for step in range(5):
        sigma = noise_deviation(step, eta, 0.55)
        assert sigma * sigma == pytest.approx(eta / math.pow(1 + step, 0.55), rel=1e-12)
    assert noise_deviation(7, eta, 0.0) == math.sqrt(eta)
    assert noise_deviation(7, eta, 2000) == 0  # less than the smallest number


def test_blocks_are_drawn_one_after_the_other_by_their_place():
    expected = torch.cat([draw((4,), (*KEY, (start,)), CPU) for start in (0, 4)] + [draw((2,), (*KEY, (8,)), CPU)])
    assert torch.equal(whole_noise((10,), block=4), expected)
    rows = [draw((2, 3), (*KEY, (start, 0)), CPU) for start in (0, 2)]
    assert torch.equal(whole_noise((4, 3), block=7), torch.cat(rows))


@st.composite
def cuts(draw_from):
    """A shape, and for each of its dimensions where it is cut."""
    shape = draw_from(st.lists(st.integers(1, 7), min_size=0, max_size=4))
    return shape, [sorted(draw_from(st.sets(st.integers(0, length), max_size=2)) | {0, length}) for length in shape]


def boxes(cut):
    """All boxes that cuts make."""
    found = [Box((), ())]
    for places in cut:
        spans = [(a, b - a) for a, b in pairwise(places)]
        found = [Box((*box.offsets, start), (*box.sizes, size)) for box in found for start, size in spans]
    return found


@settings(max_examples=40)
@given(cuts(), st.integers(1, 20))
def test_any_cut_gives_the_whole_to_the_bit(cut, block):
    shape, places = cut
    found = torch.full(shape, 2.0)
    for box in boxes(places):
        part = torch.full(box.sizes, 2.0)
        add_noise(part, shape, box, 0.1, KEY, block=block)
        box.view(found).copy_(part)
    expected = torch.full(shape, 2.0)
    add_noise(expected, shape, Box.of(shape), 0.1, KEY, block=block)
    assert torch.equal(found, expected)
    assert not torch.equal(found, torch.full(shape, 2.0))


def test_a_part_draws_the_blocks_that_it_lies_in_and_no_others(monkeypatch):
    drawn = []

    def watched(shape, key, device):
        drawn.append((key[-1], math.prod(shape)))
        return draw(shape, key, device)

    monkeypatch.setattr(noise, "draw", watched)
    shape, block = (100, 50), 500
    rows, columns = Box((25, 0), (10, 50)), Box((0, 49), (100, 1))
    add_noise(torch.zeros(rows.sizes), shape, rows, 1.0, KEY, block=block)
    assert drawn == [((20, 0), 500), ((30, 0), 500)]
    drawn.clear()
    add_noise(torch.zeros(columns.sizes), shape, columns, 1.0, KEY, block=block)
    assert drawn == [((start, 0), 500) for start in range(0, 100, 10)]
    drawn.clear()
    add_noise(torch.zeros(0, 50), shape, Box((100, 0), (0, 50)), 1.0, KEY, block=block)
    assert not drawn


def test_noise_is_made_in_float32_and_rounded_once():
    exact = whole_noise((33,), deviation=0.3)
    assert torch.equal(whole_noise((33,), dtype=torch.bfloat16, deviation=0.3), exact.bfloat16())
    assert torch.equal(whole_noise((33,), dtype=torch.float64, deviation=0.3), exact.double())
    target = torch.arange(33.0).bfloat16()
    add_noise(target, (33,), Box.of((33,)), 0.3, KEY)
    assert torch.equal(target, torch.arange(33.0).bfloat16() + exact.bfloat16())


def test_noise_is_standard_normal_within_and_over_blocks():
    number = 2**18
    numbers = whole_noise((number,), block=2**10).double()
    errors = {  # of the moments' estimates, for normal numbers
        "mean": (numbers.mean(), 0, 1 / number),
        "variance": (numbers.square().mean(), 1, 2 / number),
        "third moment": (numbers.pow(3).mean(), 0, 15 / number),
        "fourth moment": (numbers.pow(4).mean(), 3, 96 / number),
        "neighbours": ((numbers[1:] * numbers[:-1]).mean(), 0, 1 / number),
        "blocks": ((numbers[2**10 :] * numbers[: -(2**10)]).mean(), 0, 1 / number),
    }
    for name, (found, expected, variance) in errors.items():
        assert abs(float(found) - expected) < BOUND * math.sqrt(variance), name


def test_keys_that_differ_in_anything_are_uncorrelated():
    number = 2**16
    keys = [(0, "a.weight", 0), (1, "a.weight", 0), (0, "b.weight", 0), (0, "a.weight", 1), (2**32, "a.weight", 0)]
    rows = torch.stack([whole_noise((number,), key).double() for key in keys])
    products = (rows @ rows.T / number).fill_diagonal_(0)
    assert products.abs().max() < BOUND / math.sqrt(number)
    assert torch.equal(whole_noise((number,), keys[0]), rows[0].float())
