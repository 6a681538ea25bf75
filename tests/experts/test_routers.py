"""Routers as modules: their numbers in any precision, what is random, what is refused."""

import math

import pytest
import torch
from torch.testing import assert_close

from lightning_hybrid.experts import LossFree
from lightning_hybrid.experts.router import Router
from lightning_hybrid.experts.routers import ROUTERS, ExpertChoice, GShard, NoisyTopK, Switch, TopK, make_router
from lightning_hybrid.functional import noisy_routing, routing

DIM, EXPERTS = 6, 5
names = pytest.mark.parametrize("name", list(ROUTERS))


def drawn(name, **options):
    """A router whose weights are all different."""
    router = make_router(name, DIM, EXPERTS, **options)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(7))
    return router


def pairs(found):
    return zip(found.tokens.tolist(), found.experts.tolist(), strict=True)


def same(found, expected):
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.experts, expected.experts)
    assert_close(found.weights, expected.weights)
    assert_close(found.probabilities, expected.probabilities)


@pytest.mark.parametrize("num_sequences", [1, 3])
@names
def test_in_evaluation_a_router_is_its_function_of_the_logits(name, num_sequences):
    router, x = drawn(name).double().eval(), torch.randn(12, DIM, dtype=torch.float64)
    logits = x @ router.weight.T
    capacity = 12 * 2 // EXPERTS if num_sequences == 1 else 1
    expected = {
        "topk": lambda: routing.top_k(logits, 2, renormalize=True),
        "noisy_topk": lambda: noisy_routing.noisy_top_k(logits, 2),
        "switch": lambda: routing.switch(logits),
        "gshard": lambda: routing.gshard(logits, torch.zeros(12)),
        "expert_choice": lambda: routing.expert_choice(logits, capacity, num_sequences),
        "loss_free": lambda: routing.loss_free(logits.sigmoid(), torch.zeros(EXPERTS), 2, renormalize=True),
    }
    same(router(x, num_sequences), expected[name]())
    same(router(x, num_sequences), router(x, num_sequences))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@names
def test_the_body_is_in_float32_whatever_comes_in_and_under_autocast(name, kind):
    router, x = drawn(name, z_loss=0.1, jitter=0.1), torch.randn(8, DIM).to(kind)
    torch.manual_seed(1)
    expected = router(x.float())
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        found = router(x)
    assert found.weights.dtype == found.probabilities.dtype == torch.float32
    same(found, expected)
    for loss in found.losses:
        assert found.losses[loss].dtype == torch.float32
        assert found.losses[loss] == expected.losses[loss]
    narrow = drawn(name).to(torch.bfloat16)
    assert narrow(x).weights.dtype == torch.float32
    assert drawn(name).double()(x).weights.dtype == drawn(name)(x.double()).weights.dtype == torch.float64


@names
def test_losses_and_weights_have_gradients_in_the_types_of_what_they_belong_to(name):
    router, x = drawn(name, z_loss=0.1).to(torch.bfloat16), torch.randn(8, DIM).bfloat16().requires_grad_()
    found = router(x)
    (found.weights.square().sum() + found.probabilities.square().sum() + sum(found.losses.values())).backward()
    for tensor in (x, *router.parameters()):
        assert tensor.grad.dtype == torch.bfloat16
        assert tensor.grad.count_nonzero()


@names
def test_z_loss_is_a_coefficient_times_the_mean_squared_log_sum(name):
    router, x = drawn(name, z_loss=0.25).double(), torch.randn(8, DIM, dtype=torch.float64)
    assert_close(router(x).losses["z"], 0.25 * (x @ router.weight.T).logsumexp(1).square().mean())
    assert "z" not in drawn(name)(x).losses


@names
def test_jitter_multiplies_tokens_in_training_alone(name):
    router, x = drawn(name, jitter=0.2, z_loss=1.0), torch.randn(100, DIM)
    torch.manual_seed(5)
    found = router(x).losses["z"]
    torch.manual_seed(5)
    factors = torch.empty_like(x).uniform_(0.8, 1.2)
    assert_close(found, routing.router_z_loss(x * factors @ router.weight.T))
    router.eval()
    assert_close(router(x).losses["z"], routing.router_z_loss(x @ router.weight.T))


def test_noise_and_losses_of_noisy_top_k_are_their_functions():
    router, x = drawn("noisy_topk", groups="sequence").double(), torch.randn(12, DIM, dtype=torch.float64)
    torch.manual_seed(5)
    found = router(x, num_sequences=3)
    torch.manual_seed(5)
    logits, deviation = x @ router.weight.T, (1 + (x @ router.noise_weight.T).exp()).log()
    noisy = logits + torch.randn(12, EXPERTS, dtype=torch.float64) * deviation
    same(found, noisy_routing.noisy_top_k(noisy, 2))
    importance = noisy_routing.importance(found, 3)
    load = noisy_routing.probability_of_choice(logits, noisy, deviation, 2).view(3, 4, EXPERTS).sum(1)
    assert_close(found.losses["importance"], 0.1 * noisy_routing.squared_variation(importance))
    assert_close(found.losses["load"], 0.1 * noisy_routing.squared_variation(load))
    assert not NoisyTopK(DIM, EXPERTS, importance_loss=0, load_loss=0)(x.float()).losses


def test_the_second_expert_of_gshard_is_drawn_in_training_alone():
    router, x = drawn("gshard"), torch.randn(200, DIM)
    torch.manual_seed(5)
    found = router(x)
    torch.manual_seed(5)
    same(found, routing.gshard(x @ router.weight.T, torch.rand(200)))
    assert 200 < len(found.tokens) < 400
    assert len(router.eval()(x).tokens) == 400


def test_experts_choose_among_the_tokens_of_a_sequence_or_of_all():
    router, x = drawn("expert_choice").eval(), torch.randn(20, DIM)
    apart = [router(part) for part in x.split(5)]
    together = router(x, num_sequences=4)
    expected = {(token + 5 * i, expert) for i, found in enumerate(apart) for token, expert in pairs(found)}
    assert {*pairs(together)} == expected
    wide = ExpertChoice(DIM, EXPERTS, groups="all", capacity_factor=0.75)
    assert wide(x, num_sequences=4).experts.bincount().tolist() == [20 * 2 * 3 // 4 // EXPERTS] * EXPERTS
    assert [router.is_causal for router in map(drawn, ROUTERS)] == [name != "expert_choice" for name in ROUTERS]


@pytest.mark.parametrize("num_sequences", [0, 1, 3])
@names
def test_no_tokens_are_no_pairs_with_gradients_of_zero(name, num_sequences):
    router, x = drawn(name, z_loss=0.1), torch.randn(0, DIM, requires_grad=True)
    for groups in ("sequence", "all"):
        router.groups = groups
        found = router(x, num_sequences)
        assert len(found.tokens) == len(found.experts) == len(found.weights) == 0
        assert found.probabilities.shape == (0, EXPERTS)
        loss = found.weights.sum() + found.probabilities.sum() + sum(found.losses.values())
        assert loss == 0
        loss.backward()
        assert router.weight.grad.count_nonzero() == 0


@names
def test_tokens_that_are_no_number_choose_experts_that_exist(name):
    x = torch.randn(6, DIM)
    x[2] = float("nan")
    found = drawn(name)(x)
    assert found.experts.min() >= 0
    assert found.experts.max() < EXPERTS


@names
def test_one_expert_takes_everything(name):
    if name == "gshard":
        with pytest.raises(ValueError, match="top_k=2 experts cannot be chosen of num_experts=1: give 1 to 1"):
            make_router(name, DIM, 1)
        return
    router = make_router(name, DIM, 1, top_k=1)
    found = router(torch.randn(4, DIM))
    assert {*found.experts.tolist()} == {0}
    assert all(loss == 0 for loss in found.losses.values())


@names
def test_weights_on_the_meta_device_are_initialised_as_elsewhere(name):
    torch.manual_seed(2)
    expected = make_router(name, DIM, EXPERTS).state_dict()
    with torch.device("meta"):
        router = make_router(name, DIM, EXPERTS)
    router.to_empty(device="cpu")
    for tensor in router.state_dict().values():
        tensor.fill_(9)
    torch.manual_seed(2)
    router.reset_parameters()
    assert_close(router.state_dict(), expected, rtol=0, atol=0)
    assert router(torch.randn(4, DIM)).weights.isfinite().all()


def test_initial_weights_are_those_of_the_papers():
    deviation = math.sqrt(0.1 / 400)
    weight = Switch(400, 100).weight
    assert weight.abs().max() <= 2 * deviation
    # a normal distribution cut off at 2 deviations has 0.8796 of its deviation; 40,000 numbers show it to 0.4 %
    assert weight.std().item() == pytest.approx(0.8796 * deviation, rel=0.02)
    assert not NoisyTopK(8, 4).weight.any()
    assert not NoisyTopK(8, 4).noise_weight.any()
    for kind in (TopK, GShard, ExpertChoice, LossFree):
        assert 0.9 / 20 < kind(400, 100).weight.abs().max() <= 1 / 20


def test_names_make_routers_with_their_own_defaults():
    made = {name: make_router(name, DIM, EXPERTS) for name in ROUTERS}
    assert {name: type(router) for name, router in made.items()} == ROUTERS
    assert {name: router.top_k for name, router in made.items() if router.top_k != 2} == {"switch": 1}
    by_sequence = {name for name, router in made.items() if router.groups == "sequence"}
    assert by_sequence == {"gshard", "expert_choice"}
    router = make_router("topk", DIM, EXPERTS, top_k=3, z_loss=0.1, jitter=0.2, groups="sequence")
    assert (router.top_k, router.z_loss, router.jitter, router.groups) == (3, 0.1, 0.2, "sequence")
    assert "dim=6, num_experts=5, top_k=3" in repr(router)


def test_a_router_of_ones_own_needs_one_method():
    class Fixed(Router):
        def assign(self, logits, x, num_groups):
            return routing.switch(logits * 0)

    found = Fixed(DIM, EXPERTS, 1, z_loss=0.1)(torch.randn(3, DIM))
    assert found.experts.tolist() == [0, 0, 0]
    assert list(found.losses) == ["z"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopK(4, 3, 4), "top_k=4 experts cannot be chosen of num_experts=3: give 1 to 3"),
        (lambda: TopK(4, 3, 0), "top_k=0"),
        (lambda: TopK(4, 0), "num_experts=0: a router needs at least 1"),
        (lambda: TopK(0, 4), "dim=0"),
        (lambda: Switch(4, 3, 2), 'top_k=2 does not fit the router "switch".*give top_k=1'),
        (lambda: GShard(4, 3, 1), 'top_k=1 does not fit the router "gshard".*give top_k=2'),
        (lambda: TopK(4, 3, z_loss=-0.1), "z_loss=-0.1"),
        (lambda: TopK(4, 3, z_loss=float("nan")), "z_loss=nan"),
        (lambda: TopK(4, 3, jitter=-1), "jitter=-1 is not"),
        (lambda: TopK(4, 3, jitter=1.0), "jitter=1.0 could"),
        (lambda: NoisyTopK(4, 3, load_loss=-1), "load_loss=-1"),
        (lambda: NoisyTopK(4, 3, importance_loss=-1), "importance_loss=-1"),
        (lambda: LossFree(4, 3, speed=-0.1), "speed=-0.1"),
        (lambda: LossFree(4, 3, scores="tanh"), "scores='tanh'"),
        (lambda: ExpertChoice(4, 3, capacity_factor=0), "capacity_factor=0"),
        (lambda: TopK(4, 3, groups="batch"), "groups='batch'"),
        (lambda: make_router("best", 4, 3), "router='best' is unknown: choose one of topk, noisy_topk"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
