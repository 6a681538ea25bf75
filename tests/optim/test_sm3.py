import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from lightning_hybrid.optim import SM3
from tests.optim import by_hand, steps


def make(parameters, **options):
    return SM3(parameters, **{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, **options})


@pytest.mark.parametrize(("beta", "decay"), [(0.0, 0.0), (0.9, 0.1)])
def test_twenty_steps_are_those_of_the_equations(beta, decay):
    parameters, gradients = steps.draw(steps.SHAPES, steps.NUM_STEPS)
    for of_step in gradients:  # some sums stay 0
        of_step[8][0], of_step[8][:, 2], of_step[9][3, 1] = 0, 0, 0
        of_step[12][0] = 0
    starts = [parameter.detach().numpy().copy() for parameter in parameters]
    optimizer = SM3(parameters, lr=0.1, momentum=beta, weight_decay=decay)
    steps.take_steps(optimizer, parameters, gradients)
    for i, (parameter, start) in enumerate(zip(parameters, starts, strict=True)):
        of_parameter = [None if g[i] is None else g[i].numpy() for g in gradients]
        weight, state = by_hand.sm3(start, of_parameter, lr=0.1, beta=beta, decay=decay)
        assert_close(parameter.detach(), torch.from_numpy(weight), rtol=1e-12, atol=1e-14)
        assert optimizer.state[parameter].keys() == state.keys()
        for entry, values in state.items():
            found = optimizer.state[parameter][entry]
            assert_close(found.flatten(), torch.from_numpy(values).flatten(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_all_shapes_go_as_pytorch_optimizer_lets_them(momentum):
    from pytorch_optimizer import SM3 as Reference  # takes seconds

    shapes = [shape for shape in steps.SHAPES if 0 not in shape]
    (ours, gradients), (theirs, _) = steps.draw(shapes, steps.NUM_STEPS), steps.draw(shapes, steps.NUM_STEPS)
    steps.take_steps(SM3(ours, lr=0.1, momentum=momentum), ours, gradients)
    steps.take_steps(Reference(theirs, lr=0.1, momentum=momentum), theirs, gradients)
    for parameter, expected in zip(ours, theirs, strict=True):
        assert_close(parameter, expected, rtol=1e-12, atol=1e-14)


@given(
    shape=st.lists(st.integers(1, 5), max_size=4),
    scales=st.lists(st.sampled_from([0.0, 1e-3, 1.0, 1e3]), min_size=1, max_size=6),
    seed=st.integers(0, 2**16),
)
def test_no_accumulator_is_below_a_sum_of_squares(shape, scales, seed):
    generator = torch.Generator().manual_seed(seed)
    parameter, sums = nn.Parameter(torch.zeros(shape, dtype=torch.float64)), np.zeros(shape)
    optimizer = SM3([parameter], lr=0.1)
    for scale in scales:
        mask = torch.rand(shape, generator=generator) < 0.7
        gradient = torch.randn(shape, generator=generator, dtype=torch.float64) * scale * mask
        steps.take_steps(optimizer, [parameter], [[gradient]])
        sums += gradient.numpy() ** 2
        for accumulator in optimizer.state[parameter].values():
            assert (accumulator.numpy() >= sums * (1 - 1e-12)).all()  # a few roundings below an equal sum
        if len(shape) < 2:
            assert_close(optimizer.state[parameter]["accumulator_0"].numpy(), sums, rtol=1e-12, atol=1e-300)


def test_an_accumulator_has_one_length_of_the_parameter():
    parameter = nn.Parameter(torch.randn(4, 3, 2))
    parameter.grad = torch.randn_like(parameter)
    optimizer = SM3([parameter], lr=0.1, momentum=0.9)
    optimizer.step()
    shapes = {name: tuple(state.shape) for name, state in optimizer.state[parameter].items()}
    lengths = {"accumulator_0": (4, 1, 1), "accumulator_1": (1, 3, 1), "accumulator_2": (1, 1, 2)}
    assert shapes == {**lengths, "momentum_buffer": (4, 3, 2)}
    for entry, shape in shapes.items():
        collapsed = optimizer.collapsed(entry, parameter.shape)
        assert shape == tuple(1 if k in collapsed else n for k, n in enumerate(parameter.shape))


def test_nothing_moves_without_rate_and_gradients():
    steps.assert_nothing_moves_without_rate_and_gradients(make)


def test_copies_go_on():
    steps.assert_copies_go_on(make)


@pytest.mark.parametrize("option", [{"lr": -1.0}, {"momentum": 1.0}, {"weight_decay": -0.1}])
def test_options_outside_their_range_are_refused(option):
    with pytest.raises(ValueError, match="must be"):
        SM3([nn.Parameter(torch.zeros(3))], **{"lr": 0.1, **option})
