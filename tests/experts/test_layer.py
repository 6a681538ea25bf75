"""The layer against a literal one: a loop over pairs in float64, with gradients, at any number of tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from lightning_hybrid.experts import MoELayer

DIM, HIDDEN, EXPERTS = 8, 16, 4


def layer_of(dtype=torch.float64, seed=0, **options):
    torch.manual_seed(seed)
    return MoELayer(DIM, HIDDEN, EXPERTS, **({"balance_loss": 0.0} | options)).to(dtype)


def expert(layer, number, token):
    """One expert's network on one token, [D]."""

    def linear(name, x):
        bias = getattr(layer.experts, f"{name}_bias")
        return F.linear(x, getattr(layer.experts, name)[number], None if bias is None else bias[number])

    hidden = linear("up", token)
    hidden = F.silu(linear("gate", token)) * hidden if layer.experts.gate is not None else F.gelu(hidden)
    return linear("down", hidden)


def literal(layer, x, capacity=None, num_groups=1):
    """What the layer is to compute, pair by pair, and how many pairs are dropped."""
    tokens = x.reshape(-1, DIM)
    found = layer.router(tokens, num_groups)
    out = [torch.zeros(DIM, dtype=x.dtype) for _ in tokens]
    taken, dropped = dict[tuple[int, int], int](), 0
    for token, number, weight in zip(found.tokens.tolist(), found.experts.tolist(), found.weights, strict=True):
        queue = (token * num_groups // len(tokens), number)
        taken[queue] = taken.get(queue, 0) + 1
        if capacity is not None and taken[queue] > capacity:
            dropped += 1
            continue
        out[token] = out[token] + weight * expert(layer, number, tokens[token])
    if layer.shared is not None:
        out = [y + layer.shared(token) for y, token in zip(out, tokens, strict=True)]
    return (torch.stack(out) if out else tokens * 0).view(x.shape), dropped


def gradients(layer, x, out):
    """Of a loss that weighs each output differently: those of all parameters, and of the input."""
    factors = torch.linspace(1, 2, out.numel(), dtype=out.dtype).view(out.shape)
    named = {name: parameter for name, parameter in layer.named_parameters() if parameter.requires_grad} | {"x": x}
    found = torch.autograd.grad((out * factors).sum(), list(named.values()), materialize_grads=True)
    return dict(zip(named, found, strict=True))


def check_equal(layer, x, **literally):
    x = x.requires_grad_()
    expected, dropped = literal(layer, x, **literally)
    found = layer(x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradients(layer, x, found), gradients(layer, x, expected), rtol=1e-9, atol=1e-12)
    assert layer.statistics.dropped.sum() == dropped


@settings(deadline=None, max_examples=40)
@given(num_tokens=st.integers(0, 12), top_k=st.integers(1, EXPERTS), seed=st.integers(0, 2**16))
def test_without_a_capacity_each_pair_counts(num_tokens, top_k, seed):
    layer = layer_of(seed=seed, top_k=top_k)
    check_equal(layer, torch.randn(num_tokens, DIM, dtype=torch.float64))


@settings(deadline=None, max_examples=40)
@given(
    sequences=st.integers(1, 3),
    length=st.integers(1, 6),
    capacity=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
def test_with_a_capacity_the_later_pairs_are_dropped(sequences, length, capacity, seed):
    num_tokens, top_k = sequences * length, 2
    factor = capacity * EXPERTS / (num_tokens * top_k) * (1 + 1e-9)
    layer = layer_of(seed=seed, top_k=top_k, capacity_factor=factor)
    check_equal(layer, torch.randn(sequences, length, DIM, dtype=torch.float64), capacity=capacity)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("bias", [False, True])
def test_every_kind_of_expert_and_shared_ones(activation, bias):
    layer = layer_of(activation=activation, bias=bias, shared_experts=2)
    assert layer.shared.up.weight.shape == (2 * HIDDEN, DIM)
    check_equal(layer, torch.randn(2, 5, DIM, dtype=torch.float64))


def test_ties_go_to_the_first_experts_and_the_others_get_gradients_of_zeros():
    layer = layer_of(top_k=1, capacity_factor=2.0)
    torch.nn.init.zeros_(layer.router.weight)
    x = torch.randn(6, DIM, dtype=torch.float64)
    check_equal(layer, x, capacity=3)
    assert layer.statistics.counts.tolist() == [6, 0, 0, 0]
    layer(x).sum().backward()
    assert not layer.experts.up.grad[1:].any()
    assert layer.experts.up.grad[0].any()


def test_overflow_leaves_the_token_to_the_residual():
    layer = layer_of(top_k=1, capacity_factor=0.1, min_capacity=1)
    torch.nn.init.zeros_(layer.router.weight)
    out = layer(torch.randn(6, DIM, dtype=torch.float64))
    assert out[0].any()
    assert not out[1:].any()
