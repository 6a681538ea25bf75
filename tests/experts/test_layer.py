"""The layer against a literal one: a loop over pairs in float64, with gradients, at any number of tokens."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.experts import GShard, LossFree, MoELayer, NoisyTopK, Switch, TopK
from lightning_hybrid.experts.balance import balance_loss

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


@settings(max_examples=40)
@given(num_tokens=st.integers(0, 12), top_k=st.integers(1, EXPERTS), seed=st.integers(0, 2**16))
def test_without_a_capacity_each_pair_counts(num_tokens, top_k, seed):
    layer = layer_of(seed=seed, top_k=top_k)
    check_equal(layer, torch.randn(num_tokens, DIM, dtype=torch.float64))


@settings(max_examples=40)
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


def test_named_routers_and_given_ones():
    for name, kind, top_k in (
        ("topk", TopK, 2),
        ("noisy_topk", NoisyTopK, 2),
        ("switch", Switch, 1),
        ("gshard", GShard, 2),
        ("loss_free", LossFree, 2),
    ):
        layer = MoELayer(DIM, HIDDEN, EXPERTS, name)
        assert type(layer.router) is kind
        assert layer.router.top_k == top_k
        assert layer.coefficient == (0.0 if kind in (NoisyTopK, LossFree) else 0.01)
    assert MoELayer(DIM, HIDDEN, EXPERTS, top_k=3).router.top_k == 3
    router = TopK(DIM, EXPERTS, 3, z_loss=0.1)
    layer = MoELayer(DIM, HIDDEN, EXPERTS, router, balance_loss=0.3)
    assert (layer.router, layer.coefficient) == (router, 0.3)


@pytest.mark.parametrize("capacity", [{}, {"capacity_factor": 0.5, "min_capacity": 1}], ids=str)
@pytest.mark.parametrize("name", ["noisy_topk", "switch", "gshard", "loss_free"])
def test_every_router_gives_the_literal_sum(name, capacity):
    layer = layer_of(router=name, **capacity).eval()  # without noise and chance
    x = torch.randn(2, 6, DIM, dtype=torch.float64, requires_grad=True)
    groups = layer.router.num_groups(2)
    least = capacity and {"capacity": max(12 // groups * layer.router.top_k // (2 * EXPERTS), 1)}
    expected, _ = literal(layer, x, num_groups=groups, **least)
    found = layer(x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradients(layer, x, found), gradients(layer, x, expected), rtol=1e-9, atol=1e-12)


def test_a_group_of_tokens_has_a_capacity_of_its_own():
    layer = layer_of(router=TopK(DIM, EXPERTS, 1, groups="sequence"), capacity_factor=0.5 * EXPERTS)
    check_equal(layer, torch.randn(3, 4, DIM, dtype=torch.float64), capacity=2, num_groups=3)


def test_experts_that_choose_tokens_do_so_and_are_warned_of():
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="ExpertChoice is not causal: a token's experts depend on later tokens"):
        layer = MoELayer(DIM, HIDDEN, EXPERTS, "expert_choice").double()
    check_equal(layer, torch.randn(2, 4, DIM, dtype=torch.float64), num_groups=2)
    assert layer.statistics.counts.tolist() == [4] * EXPERTS
    assert layer.statistics.losses == {}


def test_losses_of_the_router_count_once_and_are_logged():
    layer, x = layer_of(router="noisy_topk", balance_loss=0.5), torch.randn(2, 6, DIM, dtype=torch.float64)
    torch.manual_seed(1)
    found = layer.router(x.view(-1, DIM))
    pairs = found.experts.view(2, 2, 6)
    counts = torch.stack([pairs[:, s].flatten().bincount(minlength=EXPERTS) for s in range(2)])
    balance = 0.5 * balance_loss(found.probabilities, counts)
    wanted = torch.autograd.grad(sum(found.losses.values()) + balance, layer.router.weight)
    torch.manual_seed(1)
    found_gradient = torch.autograd.grad((layer(x) * 0).sum(), layer.router.weight)
    torch.testing.assert_close(found_gradient, wanted, rtol=1e-9, atol=1e-12)
    values = {name: pytest.approx(loss.item(), rel=1e-12) for name, loss in found.losses.items()}
    assert layer.statistics.losses == values | {"balance": pytest.approx(balance.item(), rel=1e-12)}


def test_statistics_add_up_until_they_are_reset():
    layer, x = layer_of(), torch.randn(2, 6, DIM, dtype=torch.float64)
    found = layer.router(x.view(-1, DIM))
    for times in (1, 2):
        layer(x)
        assert layer.statistics.num_passes == times
        assert layer.statistics.num_tokens == 12 * times
        assert layer.statistics.counts.tolist() == (times * found.experts.bincount(minlength=EXPERTS)).tolist()
        entropy = -(found.probabilities * found.probabilities.log()).sum().item()
        assert layer.statistics.entropy == pytest.approx(times * entropy, rel=1e-12)
    layer.statistics.reset()
    assert layer.statistics.counts.sum() == layer.statistics.entropy == layer.statistics.num_tokens == 0


def test_copies_take_the_statistics_along_and_states_do_not():
    layer, x = layer_of(balance_over="global", balance_loss=0.5), torch.randn(2, 6, DIM, dtype=torch.float64)
    layer(x)
    assert set(layer.state_dict()) == {name for name, _ in layer.named_parameters()}
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))
        assert other.statistics.counts.tolist() == [2 * count for count in layer_counts(layer, x)]
        layer.statistics.reset()
        layer(x)


def layer_counts(layer, x):
    return layer.router(x.view(-1, DIM)).experts.bincount(minlength=EXPERTS).tolist()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_layers_train_alike(dtype):
    layer = layer_of(dtype, balance_loss=0.5, shared_experts=1, capacity_factor=1.0)
    twin = torch.compile(copy.deepcopy(layer), backend="aot_eager")
    for length in (6, 9):  # the second one compiles for any length
        x = torch.randn(2, length, DIM, dtype=dtype)
        for module in (layer, twin):
            module.zero_grad()
            module(x).square().sum().backward()
        found = {name: parameter.grad for name, parameter in twin._orig_mod.named_parameters()}
        torch.testing.assert_close(found, {name: parameter.grad for name, parameter in layer.named_parameters()})
        assert twin._orig_mod.statistics.num_tokens == layer.statistics.num_tokens


def test_autocast_routes_in_float32_and_returns_what_linear_layers_do():
    layer = layer_of(torch.float32, shared_experts=1, balance_loss=0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(torch.randn(2, 6, DIM))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert {parameter.grad.dtype for parameter in layer.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_of_16_bits_chooses_as_one_of_32(dtype):
    layer = layer_of(dtype, shared_experts=1, capacity_factor=1.0)
    wide, x = copy.deepcopy(layer).float(), torch.randn(2, 6, DIM).to(dtype)
    out = layer(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), wide(x.float()), rtol=0.02, atol=0.02)  # some roundings of bfloat16
    assert torch.equal(layer.statistics.counts, wide.statistics.counts)


@pytest.mark.parametrize("shape", [(0, DIM), (0, 5, DIM), (2, 0, DIM)])
@pytest.mark.parametrize(
    "options", [{}, {"capacity_factor": 1.0, "shared_experts": 1, "activation": "swiglu"}], ids=str
)
@pytest.mark.parametrize("router", ["topk", "noisy_topk", "switch", "gshard", "loss_free"])
def test_without_tokens_all_parameters_have_gradients_of_zeros(router, options, shape):
    layer = layer_of(router=router, balance_loss=0.5, balance_over="global", **options)
    x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == shape
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_experts_checkpointed_alone_keep_the_gradient_of_shared_ones_or_are_refused():
    layer, x = layer_of(shared_experts=1), torch.randn(4, DIM, dtype=torch.float64, requires_grad=True)
    expected = gradients(layer, x, layer(x))
    plain = layer.experts.forward
    layer.experts.forward = lambda *args: checkpoint(plain, *args, use_reentrant=False)
    torch.testing.assert_close(gradients(layer, x, layer(x)), expected)
    layer.experts.forward = lambda *args: checkpoint(plain, *args, use_reentrant=True)
    with pytest.raises(RuntimeError, match="Checkpoint the whole layer, or give use_reentrant=False"):
        layer(x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 0}, "num_experts=0"),
        ({"top_k": 5}, "top_k=5 experts cannot be chosen of num_experts=4"),
        ({"top_k": 0}, "top_k=0"),
        ({"router": "switch", "top_k": 2}, 'top_k=2 does not fit the router "switch"'),
        ({"router": "random"}, "router='random' is unknown"),
        ({"router": TopK(DIM, 3)}, "num_experts=4, and its router num_experts=3: give both the same"),
        ({"router": TopK(DIM, 4), "top_k": 1}, "top_k=1, and its router top_k=2: give both the same"),
        ({"router": "expert_choice", "capacity_factor": 1.0}, "give it to the router, ExpertChoice"),
        ({"capacity_factor": 0.0}, "capacity_factor=0.0 is no capacity"),
        ({"capacity_factor": 1.0, "capacity_rounding": "up"}, "rounding='up' is unknown"),
        ({"capacity_factor": 1.0, "min_capacity": -1}, "minimum=-1"),
        ({"min_capacity": 1}, "min_capacity=1 without a capacity_factor limits nothing"),
        ({"capacity_rounding": "up"}, "rounding='up' is unknown"),
        ({"shared_experts": -1}, "shared_experts=-1"),
        ({"activation": "tanh"}, "activation='tanh' is unknown"),
        ({"balance_loss": -0.1}, "balance_loss=-0.1"),
        ({"balance_over": "batch"}, "balance_over='batch' is unknown"),
        ({"implementation": "fast"}, "implementation='fast' is unknown"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MoELayer(**({"dim": DIM, "hidden_dim": HIDDEN, "num_experts": EXPERTS} | options))


def test_a_call_refuses_a_capacity_of_nothing_and_tokens_of_another_width():
    layer = layer_of(capacity_factor=0.5)
    with pytest.raises(ValueError, match=r"0.5 of 3 tokens with top_k=2 leaves 4 experts a capacity of 0"):
        layer(torch.randn(3, DIM, dtype=torch.float64))
    layer_of(capacity_factor=0.5, capacity_rounding="ceil")(torch.randn(3, DIM, dtype=torch.float64))
    layer_of(capacity_factor=0.5, min_capacity=1)(torch.randn(3, DIM, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"shape \[3, 9\], and the layer is for tokens of dim=8"):
        layer(torch.randn(3, 9, dtype=torch.float64))
