"""Factors of rates act in the update alone: every schedule is left as it is, and every step is that of the product."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW
from torch.optim import lr_scheduler as schedules

from lightning_hybrid.callbacks.rate_factors import RateFactors
from lightning_hybrid.optim import Lars, OptimizerTransition

STEPS = 7
FACTORS = [0.25, 0.5, 0.75, 1.0, 3.0, 0.0, 2.0]
OPTIMIZERS = {
    "SGD": lambda groups: SGD(groups, 0.02, momentum=0.9),
    "AdamW": lambda groups: AdamW(groups, 0.02),
    "AdamW with a tensor": lambda groups: AdamW(groups, torch.tensor(0.02, dtype=torch.float64)),
    "Lars": lambda groups: Lars(groups, 0.02, weight_decay=0.01),
}
SCHEDULES = {
    "none": None,
    "StepLR": lambda optimizer: schedules.StepLR(optimizer, 2, 0.5),
    "cosine, recursive": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 5, 1e-3),
    "lambda, closed": lambda optimizer: schedules.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "one cycle": lambda optimizer: schedules.OneCycleLR(optimizer, [0.1, 0.2], STEPS + 1),
    "plateau": lambda optimizer: schedules.ReduceLROnPlateau(optimizer, patience=0),
    "restarts": lambda optimizer: schedules.CosineAnnealingWarmRestarts(optimizer, 3),
    "chained": lambda optimizer: schedules.ChainedScheduler(
        [schedules.LinearLR(optimizer, 0.5, total_iters=3), schedules.ExponentialLR(optimizer, 0.9)]
    ),
}


def parameters():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(3, 2, dtype=torch.float64)) for _ in range(2)]


def groups_of(found):
    return [{"params": [found[0]]}, {"params": [found[1]], "lr": 0.2}]


def differentiate(found):
    for number, parameter in enumerate(found):
        parameter.grad = (parameter.detach() - number).sin()


def rates(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


def advance(schedule):
    if isinstance(schedule, schedules.ReduceLROnPlateau):
        schedule.step(1.0)
    elif schedule is not None:
        schedule.step()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_step_has_the_schedules_rate_times_the_factor(kind, schedule):
    """Beside it: the same schedule alone, and steps with rates that are multiplied by hand."""
    runs = {}
    for name in ("factors", "alone"):
        found = parameters()
        optimizer = OPTIMIZERS[kind](groups_of(found))
        runs[name] = found, optimizer, SCHEDULES[schedule](optimizer) if SCHEDULES[schedule] else None
    (found, optimizer, own), (other, by_hand, alone) = runs.values()
    factors = RateFactors.of(optimizer)
    factors.set("table", FACTORS.__getitem__)
    for step in range(STEPS):
        for values in (found, other):
            differentiate(values)
        before = [group["lr"] for group in by_hand.param_groups]
        for group in by_hand.param_groups:
            group["lr"] = group["lr"] * FACTORS[step]
        expected = rates(by_hand)
        optimizer.step()
        by_hand.step()
        for group, rate in zip(by_hand.param_groups, before, strict=True):
            group["lr"] = rate
        assert factors.effective_rates == expected
        assert rates(optimizer) == rates(by_hand)
        advance(own), advance(alone)
        assert rates(optimizer) == rates(by_hand)
        assert all(torch.equal(mine, its) for mine, its in zip(found, other, strict=True))
    assert factors.steps == STEPS
    state, reference = optimizer.state_dict(), by_hand.state_dict()
    torch.testing.assert_close(state, reference, rtol=0, atol=0)  # nothing of ours is in it


def test_factors_of_several_keys_multiply_and_leave_one_by_one():
    found = parameters()
    optimizer = SGD(groups_of(found), 0.5)
    factors = RateFactors.of(optimizer)
    assert RateFactors.of(optimizer) is factors
    seen = []
    for change in (
        lambda: factors.set("a", 4),
        lambda: factors.set("b", lambda step: 1 / step),
        lambda: factors.set("a", 3.0),
        lambda: factors.remove("b"),
        lambda: (factors.remove("a"), factors.remove("unknown")),
    ):
        change()
        differentiate(found)
        optimizer.step()
        seen.append(factors.effective_rates)
    expected = [4, 4 / 1, 3 / 2, 3, 1]
    assert seen == [[0.5 * factor, 0.2 * factor] for factor in expected]


def test_factor_of_one_touches_nothing():
    optimizer = AdamW(parameters(), torch.tensor(0.1))
    RateFactors.of(optimizer).set("one", 1)
    lr, seen = optimizer.param_groups[0]["lr"], []
    optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"]))
    optimizer.step()
    assert seen == [lr]
    assert seen[0] is lr


def closure_of(optimizer, found, seen):
    def closure():
        seen.append(rates(optimizer)[0])
        optimizer.zero_grad()
        loss = sum((parameter - 1).pow(4).sum() for parameter in found)
        loss.backward()
        return loss

    return closure


def test_closures_see_the_schedules_rate_however_often_they_are_called():
    results = []
    for lr, factor in ((0.1, 5.0), (0.5, None)):
        found, seen = parameters(), []
        optimizer = LBFGS(found, lr, max_iter=4)
        if factor:
            RateFactors.of(optimizer).set("five", factor)
        for _ in range(2):
            optimizer.step(closure_of(optimizer, found, seen))
        assert len(seen) > 4
        assert set(seen) == {lr}
        results.append(found)
    assert all(torch.equal(mine, its) for mine, its in zip(*results, strict=True))


def test_rate_that_a_closure_sets_counts_in_its_step_and_stays():
    found = parameters()
    optimizer = SGD(found, 0.5)
    factors = RateFactors.of(optimizer)
    factors.set("half", 0.5)

    def closure():
        optimizer.param_groups[0]["lr"] = 0.25
        differentiate(found)

    optimizer.step(closure)
    assert factors.effective_rates == [0.125]
    assert rates(optimizer) == [0.25]


def test_rate_is_given_back_after_a_closure_or_an_update_that_fails():
    found = parameters()
    optimizer = SGD(found, 0.5)
    factors = RateFactors.of(optimizer)
    factors.set("half", 0.5)

    def fails():
        raise OSError("no batch")

    with pytest.raises(OSError, match="no batch"):
        optimizer.step(fails)
    assert rates(optimizer) == [0.5]
    differentiate(found)
    optimizer.param_groups[0]["weight_decay"] = "much"
    with pytest.raises(TypeError):
        optimizer.step()
    factors.give_back()
    assert rates(optimizer) == [0.5]
    assert factors.steps == 0
    assert factors.effective_rates == []


def test_momentum_of_an_update_is_what_the_key_says_of_the_groups_own():
    for optimizer, name in ((SGD(parameters(), 0.1, momentum=0.8), "momentum"), (Adam(parameters(), 0.1), "betas")):
        seen, own = [], copy.copy(optimizer.param_groups[0][name])
        RateFactors.of(optimizer).set("m", 1.0, momentum=lambda step, own: own * (step + 1) / 4)
        optimizer.register_step_pre_hook(lambda o, *_, seen=seen, name=name: seen.append(o.param_groups[0][name]))
        for _ in range(2):
            optimizer.step()
        assert optimizer.param_groups[0][name] == own
        scaled = [(own[0] * k, own[1]) if name == "betas" else own * k for k in (1 / 4, 2 / 4)]
        assert seen == scaled


RATES = [0.1, 0.2, 0.2, 0.05, 0.4]


def trajectory(make, correct=False, rates_of=RATES, factors_of=None):
    found = parameters()
    optimizer = make(found)
    factors = RateFactors.of(optimizer)
    for step, rate in enumerate(rates_of):
        factors.set("key", factors_of[step] if factors_of else 1.0, correct_momentum=correct)
        optimizer.param_groups[0]["lr"] = rate
        differentiate(found)
        optimizer.step()
    return found, optimizer


def lars(found):
    return Lars(found, 0.1, momentum=0.9, adapt=False)


def test_corrected_momentum_is_that_of_the_paper():
    """v = m lr' / lr v + lr' g, of which remark 2 of section 3.2 says that it is SGD with the rate outside."""
    found, _ = trajectory(lars, correct=True)
    weights = [parameter.detach().clone() for parameter in parameters()]
    buffers = [torch.zeros_like(weight) for weight in weights]
    last = RATES[0]
    for rate in RATES:
        for number, (weight, buffer) in enumerate(zip(weights, buffers, strict=True)):
            buffer.mul_(0.9 * rate / last).add_(rate * (weight - number).sin())
            weight.sub_(buffer)
        last = rate
    torch.testing.assert_close([p.detach() for p in found], weights, rtol=1e-13, atol=1e-14)
    plain, _ = trajectory(lambda found: SGD(found, 0.1, momentum=0.9))
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-13)
    uncorrected, _ = trajectory(lars)
    assert not torch.allclose(found[0], uncorrected[0], rtol=1e-3)


def test_correction_knows_factors_and_schedules_alike():
    """What is in the rate and what is in the factor makes no difference; powers of two, so that no bit does."""
    by_rate, _ = trajectory(lars, correct=True, rates_of=[0.5, 1.0, 0.25])
    by_factor, _ = trajectory(lars, correct=True, rates_of=[0.5, 0.5, 1.0], factors_of=[1, 2, 0.25])
    assert all(torch.equal(mine, its) for mine, its in zip(by_rate, by_factor, strict=True))


def test_at_a_rate_of_zero_weights_stand_still_and_momentum_begins_anew():
    before, _ = trajectory(lars, correct=True, rates_of=[0.1, 0.2])
    still, optimizer = trajectory(lars, correct=True, rates_of=[0.1, 0.2, 0.0])
    assert all(torch.equal(mine, its) for mine, its in zip(before, still, strict=True))
    assert all(not state["momentum_buffer"].any() for state in optimizer.state.values())
    after, _ = trajectory(lars, correct=True, rates_of=[0.1, 0.2, 0.0, 0.1])
    moved = [mine - its for mine, its in zip(still, after, strict=True)]
    torch.testing.assert_close(moved, [0.1 * (p - number).sin() for number, p in enumerate(still)])


def test_saved_and_loaded_factors_go_on_with_the_same_buffers():
    make, kinds = (lambda found: lars(found)), {"correct": True, "factors_of": [1, 4, 2, 1, 3]}
    whole, _ = trajectory(make, **kinds)
    found, optimizer = trajectory(make, correct=True, rates_of=RATES[:2], factors_of=kinds["factors_of"])
    resumed = lars(found)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    RateFactors.of(resumed).load_state_dict(RateFactors.of(optimizer).state_dict())
    assert RateFactors.of(resumed).steps == 2
    for step in range(2, 5):
        RateFactors.of(resumed).set("key", kinds["factors_of"][step], correct_momentum=True)
        resumed.param_groups[0]["lr"] = RATES[step]
        differentiate(found)
        resumed.step()
    assert all(torch.equal(mine, its) for mine, its in zip(whole, found, strict=True))


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_torchs_scaler_skips_are_not_counted(fused):
    """Also where the optimizer itself skips, as fused ones do."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer, scaler = SGD([parameter], 0.1, fused=fused), torch.amp.GradScaler("cpu", init_scale=4.0)
    factors, counts = RateFactors.of(optimizer), []
    factors.set("ramp", lambda step: step + 1)
    for slope in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(slope * parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        counts.append((factors.steps, round(parameter[0].item(), 6)))
    assert counts == [(1, 0.9), (1, 0.9), (2, 0.7)]
    assert factors.effective_rates == [0.2]


def test_rates_of_a_transition_have_the_factor_of_both():
    found, other = parameters(), parameters()
    both = OptimizerTransition(SGD(found, 0.1), SGD(found, 0.3), lambda step: 0.5)
    RateFactors.of(both).set("half", 0.5)
    by_hand = OptimizerTransition(SGD(other, 0.05), SGD(other, 0.15), lambda step: 0.5)
    for values, optimizer in ((found, both), (other, by_hand)):
        differentiate(values)
        optimizer.step()
    torch.testing.assert_close(found, other, rtol=1e-14, atol=0)
    assert rates(both) == [1.0]


def test_what_has_no_rate_or_no_factor_is_refused():
    with pytest.raises(TypeError, match=r"int is no torch.optim.Optimizer, so that the learning rate"):
        RateFactors.of(3)
    rateless = SGD(parameters(), 0.1)
    rateless.param_groups[0]["lr"] = None
    with pytest.raises(ValueError, match=r"Group 0 of SGD has lr=None, which cannot be multiplied"):
        RateFactors.of(rateless)
    found = parameters()
    optimizer = SGD(found, 0.1)
    RateFactors.of(optimizer).set("bad", lambda step: -1.0)
    differentiate(found)
    with pytest.raises(ValueError, match=r"multiply to -1.0 in step 0. Each must be finite"):
        optimizer.step()
    assert all(torch.equal(mine, its) for mine, its in zip(found, parameters(), strict=True))
