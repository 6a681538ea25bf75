import pytest
import torch
from torch import nn
from torch.testing import assert_close

from lightning_hybrid.optim import Adafactor
from tests.optim import by_hand, steps

OPTIONS = {  # of ours and, by the names of the equations, of the transcription
    "published": ({}, {}),
    "clipped decay": ({"weight_decay": 0.1, "clip_threshold": 0.3, "lr": 0.5}, {"decay": 0.1, "d": 0.3, "lr": 0.5}),
    "own rate": (
        {"lr": 0.3, "scale_parameter": False, "relative_step": False, "beta2_decay": -0.5, "eps": (1e-6, 1e-3)},
        {"lr": 0.3, "scale": False, "relative": False, "tau": -0.5, "eps1": 1e-6},
    ),
    "large threshold": ({"min_dim_size_to_factor": 5, "eps": (1e-30, 2.0)}, {"least": 5, "eps2": 2.0}),
}
EQUATIONS = {"lr": 0.01, "tau": -0.8, "eps1": 1e-30, "eps2": 1e-3, "d": 1.0, "decay": 0.0}
EQUATIONS |= {"scale": True, "relative": True, "least": 1}


def make(parameters, **options):
    return Adafactor(parameters, **{"min_dim_size_to_factor": 2, **options})


@pytest.mark.parametrize("name", OPTIONS)
def test_twenty_steps_are_those_of_the_equations(name):
    ours, theirs = OPTIONS[name]
    parameters, gradients = steps.draw(steps.SHAPES, steps.NUM_STEPS)
    starts = [parameter.detach().numpy().copy() for parameter in parameters]
    optimizer = make(parameters, **{"min_dim_size_to_factor": 1, **ours})
    steps.take_steps(optimizer, parameters, gradients)
    for i, (parameter, start) in enumerate(zip(parameters, starts, strict=True)):
        of_parameter = [None if g[i] is None else g[i].numpy() for g in gradients]
        weight, state = by_hand.adafactor(start, of_parameter, **{**EQUATIONS, **theirs})
        assert_close(parameter.detach(), torch.from_numpy(weight), rtol=1e-12, atol=1e-14)
        assert optimizer.state[parameter].keys() == {"step", *state}
        for entry, values in state.items():
            assert_close(optimizer.state[parameter][entry], torch.from_numpy(values), rtol=1e-12, atol=0)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_vectors_and_matrices_go_as_torch_lets_them(weight_decay):
    shapes = [(7,), (5, 7), (40, 3), (2, 5, 7)]
    (ours, gradients), (theirs, _) = steps.draw(shapes, steps.NUM_STEPS), steps.draw(shapes, steps.NUM_STEPS)
    steps.take_steps(make(ours, min_dim_size_to_factor=1, weight_decay=weight_decay), ours, gradients)
    reference = torch.optim.Adafactor(theirs, eps=(1e-30, 1e-3), weight_decay=weight_decay)
    steps.take_steps(reference, theirs, gradients)
    for parameter, expected in zip(ours, theirs, strict=True):
        assert_close(parameter, expected, rtol=1e-12, atol=1e-14)


def test_states_of_a_convolution_are_matrices_of_its_channels():
    parameter = nn.Parameter(torch.randn(40, 33, 3, 3))
    parameter.grad = torch.randn_like(parameter)
    optimizer = Adafactor([parameter])
    optimizer.step()
    shapes = {name: tuple(state.shape) for name, state in optimizer.state[parameter].items()}
    assert shapes == {"step": (), "exp_avg_sq_row": (40, 1, 3, 3), "exp_avg_sq_col": (1, 33, 3, 3)}
    for entry, shape in shapes.items():
        collapsed = optimizer.collapsed(entry, parameter.shape)
        assert entry == "step" or shape == tuple(1 if k in collapsed else n for k, n in enumerate(parameter.shape))


def test_nothing_moves_without_rate_and_gradients():
    steps.assert_nothing_moves_without_rate_and_gradients(make)


def test_copies_go_on():
    steps.assert_copies_go_on(make)


@pytest.mark.parametrize(
    "option",
    [
        {"lr": -1.0},
        {"eps": (0.0, 1e-3)},
        {"eps": (1e-30, -1.0)},
        {"clip_threshold": 0.0},
        {"weight_decay": float("nan")},
        {"beta2_decay": 0.8},
        {"min_dim_size_to_factor": 0},
    ],
)
def test_options_outside_their_range_are_refused(option):
    with pytest.raises(ValueError, match="must be"):
        Adafactor([nn.Parameter(torch.zeros(3))], **option)
