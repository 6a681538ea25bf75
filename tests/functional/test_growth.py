"""Levels of growth against their equations, the schedules that they take the place of, and the sharing out."""

from itertools import product
from math import inf, isclose, nan

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, MultiStepLR

from lightning_hybrid.functional.growth import (
    Level,
    Plateau,
    Shares,
    growth_of,
    is_whole,
    level_at,
    levels,
    nodes_to_add,
    noise_scale,
    observe,
    share_out,
    step_decays,
)


def test_noise_scale_is_that_of_the_paper():
    """arXiv:1711.00489, section 4: eps N / (B (1 - m)), for rate 0.1, batch 128, momentum 0.9."""
    assert isclose(noise_scale(0.1, 128, 50_000, 0.9), 0.1 * 50_000 / 128 / 0.1, rel_tol=1e-15)
    assert noise_scale(0.5, 10, 100) == 5.0


@pytest.mark.parametrize(
    ("factors", "cap", "expected"),
    [
        ([2, 2, 2], None, [(32, 1.0), (64, 1.0), (128, 1.0), (256, 1.0)]),
        ([2, 2, 2], 100, [(32, 1.0), (64, 1.0), (96, 0.75), (96, 0.375)]),  # whole loader batches of 16 up to the cap
        ([5, 5], 160, [(32, 1.0), (160, 1.0), (160, 0.2)]),
        ([1.5, 1.5], None, [(32, 1.0), (48, 1.0), (64, 64 / 72)]),
        ([2], 32, [(32, 1.0), (32, 0.5)]),
    ],
)
def test_batches_grow_up_to_the_cap_and_then_rates_fall(factors, cap, expected):
    assert levels(32, 16, factors, cap) == [Level(*each) for each in expected]


@pytest.mark.parametrize("gamma", [0.5, 0.1, 1 / 3, 0.94])
@pytest.mark.parametrize("cap", [None, 100.0, 5000.0])
def test_noise_falls_as_under_the_schedule(gamma, cap):
    """Beside torch's own schedules: eps N / (B (1 - m)) in each epoch, to 1e-12."""
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.1, momentum=0.9)
    schedule = MultiStepLR(optimizer, [2, 3, 5, 8], gamma)
    growth = growth_of(step_decays([2, 3, 5, 8], gamma))
    table, number = levels(32, 4, list(growth.values()), cap), 0
    for epoch in range(10):
        number += epoch in growth
        batch, factor = table[number]
        rate = schedule.get_last_lr()[0]
        assert isclose(noise_scale(0.1 * factor, batch, 999, 0.9), noise_scale(rate, 32, 999, 0.9), rel_tol=1e-12)
        assert batch % 4 == 0
        assert batch <= (cap or inf)
        optimizer.step()
        schedule.step()
    assert number == len(table) - 1


def test_a_rate_that_decays_each_epoch_gives_a_level_each_epoch():
    optimizer = torch.optim.SGD([torch.zeros(1)], 1.0)
    schedule = ExponentialLR(optimizer, 0.9)
    growth = growth_of(step_decays(range(1, 30), 0.9))
    for batch, factor in levels(12, 4, list(growth.values()), 60):
        assert isclose(factor / batch, schedule.get_last_lr()[0] / 12, rel_tol=1e-12)
        optimizer.step()
        schedule.step()


def test_a_product_that_is_whole_but_for_rounding_is_whole():
    assert level_at(10, 10, (1 / 0.1) * (0.1 / 0.01) * (0.01 / 0.001)).batch == 10_000
    assert is_whole(1000.0000000001)
    assert not is_whole(1000.001)


@pytest.mark.parametrize("decays", [{2: 1.0}, {2: 0.5, 4: 0.5}, {2: 0.5, 4: 0.6}, {1: 0.0}, {1: nan}, {1: -0.5}])
def test_rates_that_do_not_fall_are_refused(decays):
    with pytest.raises(ValueError, match=r"A batch grows only where a rate falls"):
        growth_of(decays)


def test_shares_always_multiply_to_the_batches_and_prefer_accumulation():
    for batches, replicas, most, merged, more in product(range(1, 25), (1, 2, 3), (None, 1, 4), (None, 3), (None, 8)):
        numbers = [n for n in range(replicas, max(replicas, more or 0) + 1) if batches % n == 0]
        if not numbers:
            with pytest.raises(ValueError, match="cannot be dealt out"):
                share_out(batches, replicas, most, merged, more)
            continue
        found = share_out(batches, replicas, most, merged, more)
        assert found.accumulate * found.merged * found.replicas == batches
        assert replicas <= found.replicas <= max(replicas, more or 0)
        assert found.merged <= (merged or 1)
        if batches % replicas == 0 and batches // replicas <= (most or inf):
            assert found == Shares(batches // replicas, 1, replicas)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((8, 1, 2, 2, 4), Shares(2, 2, 2)),
        ((8, 1, 2, 4, 4), Shares(2, 4, 1)),
        ((8, 1, 2, 1, 4), Shares(2, 1, 4)),
        ((8, 1, 2, 2, 1), Shares(4, 2, 1)),  # the rest falls back to accumulation
        ((12, 3, 1, 1, 4), Shares(3, 1, 4)),
        ((8, 3, None, None, 4), Shares(2, 1, 4)),  # three replicas could not have it
    ],
)
def test_shares_go_to_accumulation_then_to_runs_then_to_replicas(arguments, expected):
    assert share_out(*arguments) == expected


def told(values, **options):
    plateau, grown = Plateau(), []
    for value in values:
        plateau = observe(plateau, value, **options)
        grown.append(plateau.grown)
    return grown


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        ([5, 4, 4, 4, 4, 3, 3], {"patience": 2}, [0, 0, 0, 1, 1, 1, 1]),
        ([5, 4, 5, 5, 5, 5], {"patience": 2}, [0, 0, 0, 1, 1, 2]),
        ([5, 4.95, 4.85], {"patience": 1, "min_delta": 0.1}, [0, 1, 1]),
        ([1, 2, 2, 3], {"patience": 1, "mode": "max"}, [0, 0, 1, 1]),
        ([nan, nan, 3, nan, nan], {"patience": 2}, [0, 1, 1, 1, 2]),
    ],
)
def test_a_plateau_is_so_many_values_in_a_row_that_are_no_better(values, options, expected):
    assert told(values, **options) == expected


@pytest.mark.parametrize(
    ("batches", "replicas", "nodes", "wanted", "waiting", "added"),
    [
        ([4, 8], 1, 1, 4, 3, 3),
        ([4, 8], 1, 1, 2, 3, 1),  # two of the three wait for a later level
        ([4, 8], 2, 2, 4, 1, 0),  # 3 replicas cannot share 4 batches
        ([4, 6], 1, 1, 4, 3, 1),  # 4 could not share the 6 that come later
        ([32], 8, 1, 32, 2, 1),  # nodes with 8 replicas each: 24 do not divide 32
        ([4], 1, 2, 2, 1, 0),  # half a replica on each node
        ([4], 1, 2, 2, 2, 2),
        ([4], 1, 1, 4, 0, 0),
    ],
)
def test_as_many_nodes_are_taken_in_as_can_share_the_batches(batches, replicas, nodes, wanted, waiting, added):
    assert nodes_to_add(batches, replicas, nodes, wanted, waiting) == added
