"""Each router against its equations one token at a time, over all sizes, with ties, and with gradients."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from lightning_hybrid.functional import noisy_routing, routing
from lightning_hybrid.functional.routing import Assignment, capacity_of, keep_first
from tests.functional import routing_by_hand as by_hand


@st.composite
def routed(draw, least_experts=1):
    """Logits [T, E], k, and a number of groups; half of the time with ties."""
    groups, size = draw(st.integers(1, 3)), draw(st.integers(0, 6))
    experts = draw(st.integers(least_experts, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    shape = (groups * size, experts)
    if draw(st.booleans()):
        logits = torch.randint(-1, 2, shape, generator=generator).double()
    else:
        logits = torch.randn(shape, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), draw(st.integers(1, experts)), groups, generator


def weighted(values, generator):
    """A scalar that depends on each value in a way of its own."""
    values = torch.stack(list(values)) if len(values) else torch.zeros(0, dtype=torch.float64)
    return (values * torch.randn(values.shape, generator=generator, dtype=torch.float64)).sum()


def gradient(scalar, x):
    return torch.autograd.grad(scalar, x, retain_graph=True, allow_unused=True)[0] if scalar.requires_grad else None


def assert_same(assignment, expected, logits, probabilities=None):
    """Pairs in order, weights, and gradients of the weights, of the probabilities too if given."""
    assert list(zip(assignment.tokens.tolist(), assignment.experts.tolist(), strict=True)) == list(expected)
    values = list(expected.values())
    assert_close(assignment.weights, torch.stack(values) if values else torch.zeros(0, dtype=torch.float64))
    seed = torch.Generator().manual_seed(1)
    mine, theirs = (gradient(weighted(w, seed.manual_seed(1)), logits) for w in (assignment.weights, values))
    zeros = torch.zeros_like(logits)
    assert_close(zeros if mine is None else mine, zeros if theirs is None else theirs)
    if probabilities is not None:
        assert_close(assignment.probabilities, probabilities)
    assert assignment.probabilities.shape == logits.shape


@settings(max_examples=30)
@given(routed(), st.booleans())
def test_top_k_is_its_equation(case, renormalize):
    logits, k, _, _ = case
    assert_same(
        routing.top_k(logits, k, renormalize), by_hand.top_k(logits, k, renormalize), logits, logits.softmax(-1)
    )


@settings(max_examples=30)
@given(routed())
def test_switch_is_the_best_expert_and_its_probability(case):
    logits = case[0]
    assert_same(routing.switch(logits), by_hand.top_k(logits, 1, renormalize=False), logits, logits.softmax(-1))


@settings(max_examples=30)
@given(routed(least_experts=2))
def test_gshard_sends_to_the_second_expert_by_chance(case):
    logits, _, _, generator = case
    chances = torch.rand(len(logits), generator=generator, dtype=torch.float64)
    assert_same(routing.gshard(logits, chances), by_hand.gshard(logits, chances), logits, logits.softmax(-1))


def test_gshard_sends_to_the_second_expert_in_proportion_to_its_weight():
    logits = torch.tensor([[0.0, -1.0]], dtype=torch.float64).expand(20_000, 2)
    share = logits[0].softmax(-1)[1].item()
    seconds = (routing.gshard(logits, torch.rand(20_000)).experts == 1).double().mean()
    found = seconds / (1 - seconds)  # of all pairs, a share x / (1 + x) are second ones
    assert found.item() == pytest.approx(2 * share, abs=0.02)  # four deviations: sqrt(0.54 * 0.46 / 20,000) = 0.0035
    nearly_equal = torch.tensor([[0.0, -1e-9]]).expand(1000, 2)
    assert len(routing.gshard(nearly_equal, torch.rand(1000)).tokens) == 2000


@settings(max_examples=30)
@given(routed(), st.integers(1, 8))
def test_experts_choose_their_best_tokens(case, capacity):
    logits, _, groups, _ = case
    found = routing.expert_choice(logits, capacity, groups)
    assert_same(found, by_hand.expert_choice(logits, capacity, groups), logits, logits.softmax(-1))
    size = len(logits) // groups
    assert (
        found.experts.bincount(minlength=logits.shape[1]).tolist() == [groups * min(capacity, size)] * logits.shape[1]
    )


@settings(max_examples=30)
@given(routed(), st.booleans(), st.booleans())
def test_a_bias_chooses_and_does_not_weigh(case, renormalize, is_sigmoid):
    logits, k, _, generator = case
    scores = logits.sigmoid() if is_sigmoid else logits.softmax(-1)
    bias = torch.randint(-1, 2, logits.shape[1:], generator=generator) * 0.25
    expected = by_hand.loss_free(scores, bias, k, renormalize)
    assert_same(
        routing.loss_free(scores, bias, k, renormalize), expected, logits, scores / scores.sum(-1, keepdim=True)
    )


@settings(max_examples=30)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_a_bias_moves_towards_the_mean_load(counts):
    bias = routing.balanced_bias(torch.zeros(len(counts)), torch.tensor(counts), 0.5)
    mean = Fraction(sum(counts), len(counts))
    assert bias.tolist() == [0.5 * ((mean > count) - (mean < count)) for count in counts]


@settings(max_examples=30)
@given(routed(), st.booleans())
def test_noisy_top_k_is_its_equation(case, is_training):
    logits, k, _, generator = case
    noise_logits = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    draws = torch.randn(logits.shape, generator=generator, dtype=torch.float64) * is_training
    deviation = noisy_routing.noise_deviation(noise_logits)
    assert_close(deviation, (1 + noise_logits.exp()).log())
    noisy = by_hand.noisy_logits(logits, deviation, draws)
    found = noisy_routing.noisy_top_k(logits + draws * deviation, k)
    assert_same(found, by_hand.noisy_top_k(noisy, k), logits, noisy.softmax(-1))


@settings(max_examples=30)
@given(routed(), st.booleans())
def test_importance_and_load_are_their_equations(case, is_training):
    logits, k, groups, generator = case
    shape, size, experts = logits.shape, len(logits) // groups, range(logits.shape[1])
    noise_logits = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    draws = torch.randn(shape, generator=generator, dtype=torch.float64) * is_training
    deviation = noisy_routing.noise_deviation(noise_logits)
    noisy = logits + draws * deviation

    gates = by_hand.noisy_top_k(noisy, k)
    zero = torch.zeros((), dtype=torch.float64)
    importance, load = zero, zero
    for group in range(groups):
        tokens = range(group * size, (group + 1) * size)
        sums = [sum((gates.get((t, e), zero) for t in tokens), zero) for e in experts]
        importance = importance + by_hand.squared_variation(sums) / groups
        chances = [[by_hand.probability_of_choice(logits, noisy, deviation, k, t, e) for t in tokens] for e in experts]
        load = load + by_hand.squared_variation([sum(row, zero) for row in chances]) / groups

    found = noisy_routing.importance(noisy_routing.noisy_top_k(noisy, k), groups)
    chosen = noisy_routing.probability_of_choice(logits, noisy, deviation, k)
    for mine, expected in (
        (noisy_routing.squared_variation(found), importance),
        (noisy_routing.squared_variation(noisy_routing.sums_of_groups(chosen, groups)), load),
    ):
        assert_close(mine, expected)
        for x in (logits, noise_logits):
            grads = [
                torch.autograd.grad(v, x, retain_graph=True, allow_unused=True)[0] if v.requires_grad else None
                for v in (mine, expected)
            ]
            zeros = torch.zeros_like(x)
            assert_close(*[zeros if grad is None else grad for grad in grads], rtol=1e-7, atol=1e-10)


def test_losses_of_noisy_gates_have_the_gradients_of_small_differences():
    generator = torch.Generator().manual_seed(3)
    logits, noise_logits, draws = (torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in range(3))

    def losses(logits, noise_logits):
        deviation = noisy_routing.noise_deviation(noise_logits)
        noisy = logits + draws * deviation
        sums = noisy_routing.importance(noisy_routing.noisy_top_k(noisy, 2), 2)
        chosen = noisy_routing.probability_of_choice(logits, noisy, deviation, 2)
        load = noisy_routing.squared_variation(noisy_routing.sums_of_groups(chosen, 2))
        return noisy_routing.squared_variation(sums), load

    assert torch.autograd.gradcheck(losses, (logits.requires_grad_(), noise_logits.requires_grad_()))


@pytest.mark.parametrize("scale", [1.0, 100.0, 1e4, 1e30])
@pytest.mark.parametrize("k", [1, 3, 4])
def test_losses_of_noisy_gates_have_finite_gradients_where_there_is_no_noise_left(scale, k):
    logits, noise_logits, draws = torch.randn(3, 5, 4)
    logits, noise_logits = logits.requires_grad_(), (-scale * noise_logits.abs()).requires_grad_()
    deviation = noisy_routing.noise_deviation(noise_logits)
    noisy = logits + draws * deviation
    chosen = noisy_routing.probability_of_choice(logits, noisy, deviation, k)
    importance = noisy_routing.importance(noisy_routing.noisy_top_k(noisy, k))
    loss = noisy_routing.squared_variation(chosen.sum(0)[None]) + noisy_routing.squared_variation(importance)
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()
    assert noise_logits.grad is None or noise_logits.grad.isfinite().all()


@settings(max_examples=30)
@given(routed())
def test_z_loss_is_the_mean_squared_log_sum(case):
    logits = case[0]
    expected = sum((sum(v.exp() for v in row).log() ** 2 for row in logits), torch.zeros((), dtype=torch.float64))
    expected = expected / max(len(logits), 1)
    found = routing.router_z_loss(logits)
    assert_close(found, expected)
    assert_close(gradient(found, logits), torch.zeros_like(logits) if not len(logits) else gradient(expected, logits))


@settings(max_examples=30)
@given(routed(), st.integers(1, 5))
def test_the_first_pairs_of_each_expert_and_group_stay(case, capacity):
    logits, k, groups, _ = case
    assignment = routing.top_k(logits, k, renormalize=True)
    pairs = list(zip(assignment.tokens.tolist(), assignment.experts.tolist(), strict=True))
    kept = keep_first(assignment, logits.shape[1], capacity, groups)
    assert kept.tolist() == by_hand.keep_first(pairs, len(logits), capacity, groups)


def test_first_choices_take_capacity_before_second_ones_of_earlier_tokens():
    logits = torch.tensor([[2.0, 1.0], [2.0, 1.0], [1.0, 2.0]])
    assignment = routing.top_k(logits, 2, renormalize=True)
    kept = keep_first(assignment, 2, 2)
    pairs = zip(assignment.tokens[kept].tolist(), assignment.experts[kept].tolist(), strict=True)
    assert list(pairs) == [(0, 0), (1, 0), (2, 1), (0, 1)]


def test_a_capacity_of_less_than_all_pairs_keeps_an_experts_best_tokens():
    logits = torch.randn(12, 3)
    wide, narrow = (routing.expert_choice(logits, capacity) for capacity in (6, 2))
    kept = keep_first(wide, 3, 2)
    assert torch.equal(wide.tokens[kept], narrow.tokens)
    assert torch.equal(wide.experts[kept], narrow.experts)


@settings(max_examples=30)
@given(
    st.integers(0, 100),
    st.integers(1, 9),
    st.integers(1, 4),
    st.decimals("0.01", "9", places=2),
    st.sampled_from(["floor", "ceil"]),
    st.integers(1, 4),
)
def test_capacities_are_those_of_decimal_numbers(tokens, experts, k, factor, rounding, minimum):
    capacity = capacity_of(tokens, experts, k, float(factor), rounding, minimum)
    hundredths = int(factor * 100) * tokens * k  # capacity * 100 * experts, before rounding
    rounded = hundredths // (100 * experts) if rounding == "floor" else -(-hundredths // (100 * experts))
    assert capacity == max(rounded, minimum)


def test_a_capacity_is_not_that_of_binary_numbers():
    tokens, factor = 50, 1.1
    assert factor * tokens > 55  # as floats multiply
    assert capacity_of(50, 1, 1, 1.1, "ceil") == 55
    tokens, factor = 90, 1.4
    assert factor * tokens < 126
    assert capacity_of(90, 1, 1, 1.4) == 126
    assert capacity_of(30, 1, 1, 0.1) == 3
    assert capacity_of(7, 2, 1, 1) == 3
    assert capacity_of(7, 2, 1, 1, "ceil") == 4
    assert capacity_of(0, 4, 1, 1.0) == 1


@pytest.mark.parametrize("factor", [0, -1.0, float("nan"), float("inf")])
def test_a_factor_that_is_no_capacity_is_refused(factor):
    with pytest.raises(ValueError, match="capacity_factor="):
        capacity_of(4, 2, 1, factor)


def test_a_minimum_below_0_and_an_unknown_rounding_are_refused():
    with pytest.raises(ValueError, match="minimum=-1"):
        capacity_of(4, 2, 1, 1.0, minimum=-1)
    assert capacity_of(4, 8, 1, 1.0, minimum=0) == 0
    with pytest.raises(ValueError, match="rounding='up'"):
        capacity_of(4, 2, 1, 1.0, "up")


def test_tokens_that_are_not_equal_groups_are_refused():
    with pytest.raises(ValueError, match="5 tokens are not 2 equal groups"):
        routing.expert_choice(torch.zeros(5, 2), 1, 2)
    with pytest.raises(ValueError, match="5 tokens are not 2 equal groups"):
        keep_first(routing.switch(torch.zeros(5, 2)), 2, 1, 2)


def routers(logits):
    num_tokens, num_experts = logits.shape
    yield routing.top_k(logits, 2, renormalize=True)
    yield routing.top_k(logits, 2, renormalize=False)
    yield routing.switch(logits)
    yield routing.gshard(logits, torch.rand(num_tokens))
    yield routing.expert_choice(logits, 2)
    yield routing.loss_free(logits.sigmoid(), torch.zeros(num_experts), 2, renormalize=True)
    yield noisy_routing.noisy_top_k(logits, 2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -1e30])
@pytest.mark.parametrize("rows", [slice(None), slice(1, 2)])
def test_pairs_exist_and_are_different_whatever_the_logits_are(value, rows):
    logits = torch.randn(4, 3)
    logits[rows] = value
    for found in routers(logits.requires_grad_()):
        assert all(0 <= token < 4 for token in found.tokens.tolist())
        assert all(0 <= expert < 3 for expert in found.experts.tolist())
        assert len(set(zip(found.tokens.tolist(), found.experts.tolist(), strict=True))) == len(found.tokens)
        assert keep_first(found, 3, 1).any()
        found.weights.sum().backward()


@pytest.mark.parametrize("num_experts", [2, 40, 300])
def test_equal_scores_go_to_the_lowest_numbers(num_experts):
    for found in routers(torch.zeros(50, num_experts)):
        assert set(found.experts.tolist()) in ({0}, {0, 1}, set(range(num_experts)))
    assert set(routing.expert_choice(torch.zeros(50, num_experts), 3).tokens.tolist()) == {0, 1, 2}


def test_sigmoids_that_have_all_underflowed_give_weights_of_zero():
    logits = torch.full((2, 3), -1000.0, requires_grad=True)
    found = routing.loss_free(logits.sigmoid(), torch.zeros(3), 2, renormalize=True)
    assert found.weights.tolist() == [0.0] * 4
    found.weights.sum().backward()
    assert logits.grad.isfinite().all()


def test_losses_are_added_to_those_there_are():
    found = routing.switch(torch.zeros(1, 1)).with_losses({"load": torch.ones(())}).with_losses({"z": torch.zeros(())})
    assert isinstance(found, Assignment)
    assert list(found.losses) == ["load", "z"]
