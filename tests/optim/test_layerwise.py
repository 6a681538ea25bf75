"""LARS and LAMB against their equations, pytorch-optimizer's classes, and what both papers say of them."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from lightning_hybrid.optim import Lamb, Lars
from lightning_hybrid.optim.base import Member
from lightning_hybrid.optim.norms import squared_norms
from tests.optim import by_hand_layerwise, steps

RATES = [0.1 * (1 + step % 3) for step in range(steps.NUM_STEPS)]  # a schedule
EXACT = {"rtol": 1e-12, "atol": 1e-14}


def make_lars(parameters, **options):
    return Lars(parameters, **{"lr": 0.1, "weight_decay": 0.1, **options})


def make_lamb(parameters, **options):
    return Lamb(parameters, **{"lr": 0.1, "weight_decay": 0.1, **options})


def twenty_steps(make, **options):
    """Parameters before and after, the gradients of each, and the optimizer; one parameter begins with zeros."""
    parameters, gradients = steps.draw(steps.SHAPES, steps.NUM_STEPS)
    with torch.no_grad():
        parameters[8].zero_()
    for of_step in gradients[:4]:
        of_step[9].zero_()
    starts = [parameter.detach().numpy().copy() for parameter in parameters]
    optimizer = make(parameters, **options)
    for rate, of_step in zip(RATES, gradients, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        steps.take_steps(optimizer, parameters, [of_step])
    per_parameter = [[None if g[i] is None else g[i].numpy() for g in gradients] for i in range(len(parameters))]
    return optimizer, zip(parameters, starts, per_parameter, strict=True)


@pytest.mark.parametrize(
    ("options", "by_hand"),
    [
        ({}, {}),
        ({"nesterov": True, "adapt": True}, {"nesterov": True, "adapt": True}),
        ({"momentum": 0.0, "max_trust_ratio": 0.02}, {"mu": 0.0, "most": 0.02}),
        ({"weight_decay": 0.0, "trust_coefficient": 0.5, "adapt": False}, {"beta": 0.0, "eta": 0.5, "adapt": False}),
    ],
)
def test_twenty_steps_of_lars_are_those_of_the_equations(options, by_hand):
    optimizer, outcomes = twenty_steps(make_lars, **options)
    usual = {"mu": 0.9, "beta": 0.1, "eta": 0.001, "most": math.inf, "adapt": None, "nesterov": False}
    for parameter, start, gradients in outcomes:
        weight, buffer = by_hand_layerwise.lars(start, gradients, rates=RATES, **{**usual, **by_hand})
        assert_close(parameter.detach(), torch.from_numpy(weight), **EXACT)
        if options.get("momentum") != 0.0:
            assert_close(optimizer.state[parameter]["momentum_buffer"], torch.from_numpy(buffer), **EXACT)


@pytest.mark.parametrize(
    ("options", "by_hand"),
    [
        ({}, {}),
        ({"bias_correction": False, "adapt": True}, {"correct": False, "adapt": True}),
        ({"weight_norm_bounds": (0.5, 2.0), "max_trust_ratio": 0.3}, {"bounds": (0.5, 2.0), "most": 0.3}),
        ({"weight_decay": 0.0, "betas": (0.0, 0.9), "eps": 1e-3}, {"decay": 0.0, "beta1": 0.0, "beta2": 0.9}),
    ],
)
@pytest.mark.parametrize("is_fused", [True, False])
def test_twenty_steps_of_lamb_are_those_of_the_equations(options, by_hand, is_fused, monkeypatch):
    if not is_fused:
        monkeypatch.setattr("lightning_hybrid.optim.lamb.FUSED", ())
    optimizer, outcomes = twenty_steps(make_lamb, **options)
    usual = {"beta1": 0.9, "beta2": 0.999, "eps": options.get("eps", 1e-6), "decay": 0.1, "correct": True}
    usual |= {"bounds": (0.0, math.inf), "most": math.inf, "adapt": None}
    for parameter, start, gradients in outcomes:
        weight, first, second = by_hand_layerwise.lamb(start, gradients, rates=RATES, **{**usual, **by_hand})
        assert_close(parameter.detach(), torch.from_numpy(weight), **EXACT)
        assert_close(optimizer.state[parameter]["exp_avg"], torch.from_numpy(first), **EXACT)
        assert_close(optimizer.state[parameter]["exp_avg_sq"], torch.from_numpy(second), **EXACT)


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_goes_as_pytorch_optimizer_lets_it_while_the_rate_stays(nesterov):
    reference = pytest.importorskip("pytorch_optimizer").LARS
    (ours, gradients), (theirs, _) = (steps.draw(steps.SHAPES[3:], steps.NUM_STEPS) for _ in range(2))
    decays = [{"params": [p for p in ours if p.ndim > 1]}, {"params": [p for p in ours if p.ndim < 2]}]
    decays[1]["weight_decay"] = 0.0  # it leaves these out of both
    copies = [[None if g is None else g.clone() for g in of_step] for of_step in gradients]  # it writes in gradients
    steps.take_steps(Lars(decays, lr=0.1, weight_decay=0.1, nesterov=nesterov), ours, gradients)
    steps.take_steps(reference(theirs, lr=0.1, weight_decay=0.1, nesterov=nesterov, foreach=False), theirs, copies)
    for parameter, expected in zip(ours, theirs, strict=True):
        assert_close(parameter, expected, **EXACT)


def test_lamb_goes_as_pytorch_optimizer_lets_the_third_preprint():
    reference = pytest.importorskip("pytorch_optimizer").Lamb
    shapes = [(5, 7), (3, 5, 7), (6, 1)]
    (ours, gradients), (theirs, _) = (steps.draw(shapes, steps.NUM_STEPS) for _ in range(2))
    options = {"lr": 0.1, "weight_decay": 0.1, "eps": 1e-14}  # which it adds to the norm too
    preprint = {"bias_correction": False, "weight_norm_bounds": (0.0, 10.0)}
    steps.take_steps(Lamb(ours, **options, **preprint), ours, gradients)
    steps.take_steps(reference(theirs, **options, adam_debias=True, weight_decouple=False), theirs, gradients)
    for parameter, expected in zip(ours, theirs, strict=True):
        assert_close(parameter, expected, rtol=1e-11, atol=1e-13)


def test_a_step_of_lamb_has_the_length_of_the_rate():
    parameter = nn.Parameter(torch.randn(6, 5, dtype=torch.float64))
    optimizer = Lamb([parameter], lr=0.01, weight_decay=0.1)
    for step in range(5):
        before = parameter.detach().clone()
        steps.take_steps(optimizer, [parameter], [[torch.randn(6, 5, dtype=torch.float64) * 10.0**step]])
        assert_close((parameter - before).norm(), 0.01 * before.norm(), rtol=1e-12, atol=0)


def test_norms_of_many_numbers_are_right_in_float32():
    values = 3 * torch.randn(2_000_000) + 1  # for which torch's own is wrong by more than 1e-5
    (found,) = squared_norms([Member(values, values, values, {}, (), tuple(values.shape))], [values])
    assert float(found.value) == pytest.approx(float(values.double().square().sum()), rel=2e-6)


def test_memory_formats_that_no_fused_kernel_takes():
    parameters = [nn.Parameter(torch.randn(4, 3, 5, 5, dtype=torch.float64)) for _ in range(2)]
    with torch.no_grad():
        parameters[1].copy_(parameters[0])
    parameters[1].data = parameters[1].data.to(memory_format=torch.channels_last)
    gradients = [[torch.randn(4, 3, 5, 5, dtype=torch.float64)] * 2 for _ in range(3)]
    steps.take_steps(Lamb(parameters, lr=0.1), parameters, gradients)
    assert not parameters[1].is_contiguous()
    assert_close(parameters[1], parameters[0], **EXACT)


@pytest.mark.parametrize("make", [make_lars, make_lamb])
def test_nothing_moves_without_rate_and_gradients(make):
    steps.assert_nothing_moves_without_rate_and_gradients(make)


@pytest.mark.parametrize("make", [make_lars, make_lamb])
def test_copies_go_on(make):
    steps.assert_copies_go_on(make)


@pytest.mark.parametrize("option", [{"lr": -1.0}, {"weight_decay": math.nan}, {"max_trust_ratio": -1.0}])
@pytest.mark.parametrize("make", [make_lars, make_lamb])
def test_options_outside_their_range_are_refused(make, option):
    with pytest.raises(ValueError, match="must be"):
        make([nn.Parameter(torch.zeros(3))], **option)


@pytest.mark.parametrize(
    ("make", "option", "message"),
    [
        (make_lars, {"momentum": 1.0}, r"Lars\(momentum=1.0\)"),
        (make_lars, {"momentum": 0.0, "nesterov": True}, "Set momentum above 0"),
        (make_lamb, {"betas": (0.9, 1.0)}, r"Lamb\(beta2=1.0\)"),
        (make_lamb, {"weight_norm_bounds": (2.0, 1.0)}, "a lower and an upper bound"),
        (make_lamb, {"weight_norm_bounds": 10}, "must be two numbers"),
        (make_lamb, {"adapt": "False"}, "must be True, False or None"),
        (make_lars, {"lr": "1e-3"}, "must be a finite number"),
    ],
)
def test_options_of_one_outside_their_range_are_refused(make, option, message):
    with pytest.raises(ValueError, match=message):
        make([nn.Parameter(torch.zeros(3))], **option)
