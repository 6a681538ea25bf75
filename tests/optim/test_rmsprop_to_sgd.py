"""RMSpropToSGD against the steps as they are written."""

import numpy as np
import pytest
import torch
from torch import nn

from lightning_hybrid.optim import RMSpropToSGD
from tests.optim.by_hand_transition import rmsprop_to_sgd

STEPS, SHAPES = 20, [(3, 2), (4,), ()]
RATES = {"constant": lambda t: 1.0, "warm-up from 0": lambda t: min(1.0, t / 8), "to 0": lambda t: 1 - t / (STEPS - 1)}


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in SHAPES]


def gradients():
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES] for _ in range(STEPS)]


def flat(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).numpy().copy()


def step(optimizer, held, found):
    for parameter, gradient in zip(held, found, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()


@pytest.mark.parametrize("literal", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("rates", RATES)
def test_twenty_steps_are_those_on_paper(rates, decay, literal):
    """Epochs of 4 steps: the curve's three branches have 8, 6 and 6 of the steps."""
    held = parameters()
    start, found = flat(held), []
    options = {"steps_per_epoch": 4, "center": 2.0, "period": 3.0, "weight_decay": decay, "literal": literal}
    optimizer = RMSpropToSGD(held, 0.05, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, RATES[rates])
    used = []
    for given in gradients():
        used.append(optimizer.param_groups[0]["lr"])
        step(optimizer, held, given)
        scheduler.step()
        found.append(flat(held))
    expected = rmsprop_to_sgd(
        start, [flat(g) for g in gradients()], used, 4, center=2.0, period=3.0, decay=decay, literal=literal
    )
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert (0.0 in used) == (rates != "constant")


def test_the_two_curves_part_after_the_center():
    ends = []
    for literal in (False, True):
        held = parameters()
        optimizer = RMSpropToSGD(held, 0.05, steps_per_epoch=4, center=2.0, period=3.0, literal=literal)
        found = []
        for given in gradients():
            step(optimizer, held, given)
            found.append(flat(held))
        ends.append(found)
    np.testing.assert_array_equal(ends[0][8], ends[1][8])
    assert not np.allclose(ends[0][9], ends[1][9])


def test_a_step_without_rate_moves_nothing_and_leaves_finite_states():
    held = parameters()
    start = [parameter.detach().clone() for parameter in held]
    optimizer = RMSpropToSGD(held, 0.0, steps_per_epoch=4)
    step(optimizer, held, [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES])
    step(optimizer, held, gradients()[0])
    assert all(torch.equal(parameter, before) for parameter, before in zip(held, start, strict=True))
    assert all(value.isfinite().all() for state in optimizer.state.values() for value in state.values())


def test_parameters_without_gradients_wait_in_their_own_epoch():
    held = parameters()
    optimizer = RMSpropToSGD(held, 0.05, steps_per_epoch=4, center=2.0, period=3.0)
    late = parameters()
    alone = RMSpropToSGD(late[1:2], 0.05, steps_per_epoch=4, center=2.0, period=3.0)
    for number, given in enumerate(gradients()):
        for index, parameter in enumerate(held):
            parameter.grad = None if index == 1 and number < 10 else given[index].clone()
        optimizer.step()
        if number >= 10:
            step(alone, late[1:2], given[1:2])
    assert torch.equal(held[1], late[1])
    assert [int(optimizer.state[p]["step"]) for p in held] == [20, 10, 20]


def test_float16_is_refused():
    held = [nn.Parameter(torch.ones(2, dtype=torch.float16))]
    with pytest.raises(RuntimeError, match=r"RMSpropToSGD got parameters in torch\.float16"):
        step(RMSpropToSGD(held, 0.1, steps_per_epoch=1), held, [torch.ones(2, dtype=torch.float16)])


@pytest.mark.parametrize(
    "options", [{"period": 0}, {"steps_per_epoch": 0}, {"eps": 0}, {"momentum": 1}, {"rms_lr": -1}, {"center": -1}]
)
def test_options_outside_their_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        RMSpropToSGD(parameters(), 0.1, **{"steps_per_epoch": 1, **options})


def test_a_leap_of_the_rate_is_warned_of_while_rmsprop_steps():
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = RMSpropToSGD([parameter], 0.5, steps_per_epoch=4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / 8, total_iters=8)
    for _ in range(10):  # even: no warning, which is an error in tests
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        schedule.step()
    optimizer.param_groups[0]["lr"] = 5.0
    with pytest.warns(UserWarning, match=r"went from 0.5 to 5 in one step.*start_factor=1 / n"):
        optimizer.step()
    assert 0 < optimizer.last_share < 1


def test_a_saved_curve_counts_with_a_warning():
    parameter = nn.Parameter(torch.ones(3))
    saved = RMSpropToSGD([parameter], 0.5, steps_per_epoch=4, center=3).state_dict()
    optimizer = RMSpropToSGD([parameter], 0.5, steps_per_epoch=8, center=3)
    with pytest.warns(UserWarning, match=r"saved steps_per_epoch=4, center=3, period=5.0, literal=False of RMS"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["steps_per_epoch"] == 4
