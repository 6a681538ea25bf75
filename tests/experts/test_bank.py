"""Stacked experts: one grouped product equals a loop over the experts, within the rounding of their types."""

import math

import pytest
import torch
from torch.nn import functional as F

from lightning_hybrid.experts.bank import DenseMLP, Experts

DIM, HIDDEN = 16, 24
COUNTS = [[3, 0, 4, 5], [0, 0, 0, 7], [0, 0, 0, 0], [1, 1, 1, 1]]


def bank_of(dtype=torch.float64, seed=0, **options):
    torch.manual_seed(seed)
    return Experts(DIM, HIDDEN, 4, **options).to(dtype)


def identity(x):
    return x


def results(bank, tokens, counts):
    """Outputs and the gradients of the input and all parameters, for an output's gradient of ones."""
    tokens = tokens.detach().requires_grad_()
    out = bank(tokens, torch.tensor(counts))
    named = dict(bank.named_parameters()) | {"tokens": tokens}
    found = torch.autograd.grad(out, list(named.values()), torch.ones_like(out))
    return dict(zip(named, found, strict=True)) | {"out": out.detach()}


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("implementation", ["grouped", "loop"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_implementations_are_within_their_rounding(dtype, implementation, counts):
    """Of experts that are products alone, whose error has a bound.

    A sum of n products in float32 is off by at most n of its roundings of the sum of their absolute values, and each
    result, of which there are two in a row and a sum of biases, by two of the type's own. What the absolute values add
    up to is what the same network makes of them in float64. Products in float16 may be added in that type.
    """
    bank = bank_of(dtype, activation=identity, bias=True, implementation=implementation)
    tokens = torch.randn(sum(counts), DIM).to(dtype)
    exact = bank_of(activation=identity, bias=True, implementation="loop")
    exact.load_state_dict(bank.state_dict())
    wanted = results(exact, tokens.double(), counts)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.abs_()
    sizes = results(exact, tokens.double().abs(), counts)
    own, sums = torch.finfo(dtype).eps, torch.finfo(torch.float16 if dtype == torch.float16 else torch.float32).eps
    bound = (DIM + HIDDEN + len(tokens)) * sums + 4 * own
    for name, value in results(bank, tokens, counts).items():
        assert value.dtype == dtype
        assert ((value.double() - wanted[name]).abs() <= bound * sizes[name]).all(), name


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("activation", ["gelu", "relu", "silu", "swiglu"])
def test_each_expert_is_the_dense_network_of_its_slice(activation, counts):
    bank, dense = bank_of(activation=activation, bias=True), DenseMLP(DIM, HIDDEN, activation, bias=True).double()
    tokens = torch.randn(sum(counts), DIM, dtype=torch.float64)
    out = bank(tokens, torch.tensor(counts))
    for number, (rows, outputs) in enumerate(zip(tokens.split(counts), out.split(counts), strict=True)):
        named = {
            f"{name}.{'bias' if kind else 'weight'}": getattr(bank, f"{name}_bias" if kind else name)[number]
            for name in ("up", "gate", "down")
            for kind in (False, True)
            if getattr(dense, name) is not None
        }
        torch.testing.assert_close(outputs, torch.func.functional_call(dense, named, rows), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_parameter_has_a_gradient_also_without_tokens(dtype):
    for counts in COUNTS:
        bank = bank_of(dtype, activation="swiglu", bias=True)
        bank(torch.randn(sum(counts), DIM, dtype=dtype), torch.tensor(counts)).sum().backward()
        for parameter in bank.parameters():
            assert [bool(part.any()) for part in parameter.grad] == [count > 0 for count in counts]


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_grouped_products_take_any_memory(rows):
    """Rows, matrices and gradients that are transposed, expanded, or part of others."""
    bank, counts = bank_of(torch.float32, implementation="grouped"), torch.tensor([rows, 0, 0, 0])
    wanted = results(bank, torch.ones(rows, DIM), [rows, 0, 0, 0])
    with torch.no_grad():
        bank.up.set_(torch.cat([torch.zeros(1), bank.up.flatten()])[1:].view_as(bank.up))
        bank.down.set_(bank.down.transpose(1, 2).contiguous().transpose(1, 2))
    for tokens in (
        torch.ones(DIM, rows).T,
        torch.ones(()).expand(rows, DIM),
        torch.ones(rows, 2 * DIM)[:, 1 : DIM + 1],
    ):
        for gradient in (torch.ones(DIM, rows).T, torch.ones(()).expand(rows, DIM)):
            out = bank(tokens, counts)
            found = torch.autograd.grad(out, [bank.up, bank.down], gradient)
            torch.testing.assert_close(out, wanted["out"])
            torch.testing.assert_close(found, (wanted["up"], wanted["down"]))


@pytest.mark.parametrize("implementation", ["grouped", "loop"])
def test_autocast_computes_as_in_linear_layers(implementation):
    bank, dense = bank_of(torch.float32, implementation=implementation), DenseMLP(DIM, HIDDEN)
    dense.load_state_dict({"up.weight": bank.up[1], "down.weight": bank.down[1]})
    tokens = torch.randn(6, DIM)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, expected = bank(tokens, torch.tensor([0, 6, 0, 0])), dense(tokens)
    torch.testing.assert_close(out, expected)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert {parameter.grad.dtype for parameter in bank.parameters()} == {torch.float32}
    bank.implementation = "auto"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert bank.double()(tokens.double(), torch.tensor([0, 6, 0, 0])).dtype == torch.float64


def test_what_cannot_be_grouped_is_computed_in_a_loop_or_refused():
    counts = torch.tensor([2, 3])
    for dim, hidden, dtype, named in (
        (DIM, HIDDEN, torch.float64, "in torch.float64"),
        (DIM, 7, torch.float32, "hidden_dim=7 in torch.float32"),
        (6, HIDDEN, torch.bfloat16, "dim=6 in torch.bfloat16"),
    ):
        tokens = torch.randn(5, dim).to(dtype)
        loop, auto, grouped = (
            Experts(dim, hidden, 2, implementation=name).to(dtype) for name in ("loop", "auto", "grouped")
        )
        auto.load_state_dict(loop.state_dict())
        assert torch.equal(auto(tokens, counts), loop(tokens, counts))
        with pytest.raises(ValueError, match=f'implementation="grouped" cannot compute {named}'):
            grouped(tokens, counts)


def test_automatic_experts_are_grouped_where_they_can_be(monkeypatch):
    called = []
    monkeypatch.setattr(F, "grouped_mm", lambda *args, f=F.grouped_mm, **kwargs: called.append(1) or f(*args, **kwargs))
    bank_of(torch.float32)(torch.randn(5, DIM), torch.tensor([2, 3, 0, 0]))
    assert len(called) == 2


def test_experts_start_as_linear_layers_do_each_on_its_own():
    bank = Experts(64, 256, 3, bias=True)
    for name, inputs in (("up", 64), ("up_bias", 64), ("down", 256), ("down_bias", 256)):
        parameter = getattr(bank, name).detach()
        bound = 1 / math.sqrt(inputs)
        assert parameter.abs().max() <= bound
        assert parameter.std() == pytest.approx(bound / math.sqrt(3), rel=0.1)
        assert len(parameter.flatten().unique()) > 0.99 * parameter.numel()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 0}, "dim=0"),
        ({"hidden_dim": 0}, "hidden_dim=0"),
        ({"num_experts": 0}, "num_experts=0"),
        ({"activation": "tanh"}, "activation='tanh' is unknown: choose one of 'gelu', 'relu', 'silu', 'swiglu'"),
        ({"implementation": "fast"}, "implementation='fast' is unknown"),
    ],
)
def test_what_makes_no_experts_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Experts(**({"dim": 4, "hidden_dim": 4, "num_experts": 2} | options))
