"""OptimizerTransition against steps of its two optimizers by hand, and as an optimizer that others work with."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adagrad, AdamW, SparseAdam
from torch.optim.lr_scheduler import LambdaLR

from lightning_hybrid.optim import SM3, Adafactor, Lamb, Lars, OptimizerTransition, linear_schedule, transition_schedule
from lightning_hybrid.optim.transition import flattened
from tests.optim.by_hand_transition import mean_of_two

STEPS, SHAPES = 12, [(4, 3), (3,), ()]
MAKE = {
    "adamw": lambda groups: AdamW(groups, 0.01, weight_decay=0.1),
    "sgd": lambda groups: SGD(groups, 0.05, momentum=0.9),
    "lamb": lambda groups: Lamb(groups, 0.02, weight_decay=0.1),
    "lars": lambda groups: Lars(groups, 0.1, trust_coefficient=0.1),
    "adagrad": lambda groups: Adagrad(groups, 0.05),
    "adafactor": lambda groups: Adafactor(groups, 0.05, min_dim_size_to_factor=2),
    "sm3": lambda groups: SM3(groups, 0.05, momentum=0.9),
}
PAIRS = [("adamw", "sgd"), ("lamb", "lars"), ("adagrad", "adamw"), ("adafactor", "sm3")]
each_pair = pytest.mark.parametrize("pair", PAIRS, ids="-".join)


class Greedy(SGD):
    """Writes its weight decay into the gradient, as some do."""

    def step(self, closure=None):
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.grad.add_(parameter, alpha=0.1)
        return super().step(closure)


class Counting(SGD):
    """Counts in its group, and takes shorter steps all the time."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        for group in self.param_groups:
            group["k"] = 0

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                parameter.data -= group["lr"] / group["k"] * parameter.grad


class Driven(SGD):
    """Sets its own rate."""

    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["lr"] *= 0.5


def parameters(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in SHAPES]


def groups_of(held):
    return [{"params": held[:1]}, {"params": held[1:]}]


def transition(held, pair, schedule):
    first, second = (MAKE[name](groups_of(held)) for name in pair)
    return OptimizerTransition(first, second, schedule)


def set_gradients(held, step):
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in held:
        gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = gradient.to(parameter.dtype)


def run(optimizer, held, steps, scheduler=None):
    for step in steps:
        set_gradients(held, step)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return [parameter.detach().clone() for parameter in held]


def assert_equal(found, expected):
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def at_half(step):
    return 0.5


@each_pair
@pytest.mark.parametrize("end", [0, 1])
def test_at_its_ends_it_is_one_of_the_two_to_the_bit(pair, end):
    held, alone = parameters(), parameters()
    found = run(transition(held, pair, lambda step: end), held, range(STEPS))
    assert_equal(found, run(MAKE[pair[end]](groups_of(alone)), alone, range(STEPS)))


@each_pair
def test_between_it_is_the_mean_of_both_steps(pair):
    """Each of the two has seen the transition's weights, and its own statistics; 1e-15 is a few roundings."""
    held, schedule = parameters(), linear_schedule(2, 9)
    optimizer = transition(held, pair, schedule)
    twins = [parameters(), parameters()]
    others = [MAKE[name](groups_of(twin)) for name, twin in zip(pair, twins, strict=True)]
    for step in range(STEPS):
        start = [parameter.detach().clone() for parameter in held]
        for twin, other in zip(twins, others, strict=True):
            for parameter, value in zip(twin, start, strict=True):
                parameter.data.copy_(value)
            run(other, twin, [step])
        expected = mean_of_two(start, *twins, schedule(step))
        torch.testing.assert_close(run(optimizer, held, [step]), expected, rtol=1e-14, atol=1e-15)


def test_the_second_has_its_statistics_when_it_takes_over():
    """It has moved nothing before: its moments are those of gradients alone, which do not depend on weights here."""
    held, alone = parameters(), parameters()
    optimizer = transition(held, ("sgd", "adamw"), linear_schedule(STEPS, STEPS))
    run(optimizer, held, range(STEPS))
    other = MAKE["adamw"](groups_of(alone))
    run(other, alone, range(STEPS))
    for parameter, twin in zip(held, alone, strict=True):
        for entry, value in other.state[twin].items():
            assert torch.equal(optimizer.state[parameter][f"second_{entry}"], value)


def test_what_the_second_makes_counts_for_nothing_at_first():
    held, alone = parameters(), parameters()
    wild = OptimizerTransition(SGD(held, 0.1), SGD(held, 1e308 * 10), lambda step: 0)
    found = run(wild, held, range(3))
    assert_equal(found, run(SGD(alone, 0.1), alone, range(3)))


def test_an_optimizer_that_writes_in_gradients_leaves_them_to_the_first():
    held, alone = parameters(), parameters()
    optimizer = OptimizerTransition(SGD(held, 0.1), Greedy(held, 0.1), lambda step: 0)
    assert_equal(run(optimizer, held, range(3)), run(SGD(alone, 0.1), alone, range(3)))


@pytest.mark.parametrize("foreach", [False, True])
def test_momentum_that_looks_ahead_leaves_gradients_to_the_first(foreach):
    """As in a transition to it, torch's SGD writes in them if it takes many tensors at once, its default on GPUs."""
    held, alone = parameters(), parameters()
    options = {"momentum": 0.9, "nesterov": True, "foreach": foreach}
    optimizer = OptimizerTransition(SGD(held, 0.1), SGD(held, 0.1, **options), lambda step: 0)
    assert_equal(run(optimizer, held, range(3)), run(SGD(alone, 0.1), alone, range(3)))


def test_options_that_an_optimizer_changes_are_kept():
    held, alone = parameters(), parameters()
    optimizer = OptimizerTransition(Counting(held, 0.1), SGD(held, 0.1), lambda step: 0)
    found = run(optimizer, held, range(5))
    assert_equal(found, run(Counting(alone, 0.1), alone, range(5)))
    assert optimizer.param_groups[0]["first_k"] == 5


@each_pair
def test_schedulers_scale_both_rates(pair):
    """A rate of 0 leaves everything where it is; half of it is half the step of plain SGD."""
    held, twin = parameters(), parameters()
    optimizer = transition(held, pair, at_half)
    scheduler = LambdaLR(optimizer, lambda step: float(step > 2))
    assert_equal(run(optimizer, held, range(3), scheduler), twin)
    assert not torch.equal(run(optimizer, held, [3], scheduler)[0], twin[0])
    assert optimizer.param_groups[1]["first_lr"] == MAKE[pair[0]](parameters()).param_groups[0]["lr"]


def test_a_scheduled_run_is_that_of_the_single_optimizer():
    held, alone = parameters(), parameters()
    optimizer, other = transition(held, ("sgd", "adamw"), lambda step: 0), MAKE["sgd"](groups_of(alone))
    scheduled = [LambdaLR(each, lambda step: 1 / (1 + step)) for each in (optimizer, other)]
    assert_equal(run(optimizer, held, range(6), scheduled[0]), run(other, alone, range(6), scheduled[1]))


@each_pair
def test_a_run_goes_on_from_a_saved_state(pair):
    schedule = transition_schedule(6, 6)
    held = parameters()
    expected = run(transition(held, pair, schedule), held, range(STEPS))
    held = parameters()
    optimizer = transition(held, pair, schedule)
    run(optimizer, held, range(5))
    saved = io.BytesIO()
    torch.save([optimizer.state_dict(), [parameter.detach() for parameter in held]], saved)
    saved.seek(0)
    state, values = torch.load(saved)
    resumed = parameters()
    for parameter, value in zip(resumed, values, strict=True):
        parameter.data.copy_(value)
    other = transition(resumed, pair, schedule)
    other.load_state_dict(state)
    assert other.param_groups[0]["step"] == 5
    assert_equal(run(other, resumed, range(5, STEPS)), expected)


def test_counts_of_steps_keep_their_type_in_a_bfloat16_state():
    """301 is no bfloat16."""
    held = parameters(torch.bfloat16)
    optimizer = transition(held, ("adamw", "lamb"), at_half)
    run(optimizer, held, range(2))
    for state in optimizer.state.values():
        state["first_step"] += 299
        state["second_step"] += 299
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for parameter, state in optimizer.state.items():
        assert [float(state[name]) for name in ("first_step", "second_step")] == [301, 301]
        assert state["first_exp_avg"].dtype == parameter.dtype
    assert float(torch.tensor(301.0).bfloat16()) != 301


def test_hooks_before_a_load_may_change_what_is_loaded():
    held = parameters()
    optimizer = transition(held, ("adamw", "sgd"), at_half)
    run(optimizer, held, range(2))

    def forget(_, state):
        return {**state, "state": {0: {**state["state"][0], "first_step": torch.tensor(9.0)}}}

    optimizer.register_load_state_dict_pre_hook(forget)
    optimizer.load_state_dict(optimizer.state_dict())
    assert [float(state["first_step"]) for state in optimizer.state.values()] == [9]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_go_on_alike(duplicate):
    held = parameters()
    optimizer = transition(held, ("adamw", "sgd"), transition_schedule(6, 6))
    run(optimizer, held, range(4))
    others, other = duplicate((held, optimizer))
    assert_equal(run(optimizer, held, range(4, 8)), run(other, others, range(4, 8)))


def test_closures_are_called_once_and_gradients_are_cleared():
    held, calls = parameters(), []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = sum(parameter.square().sum() for parameter in held)
        loss.backward()
        return loss

    optimizer = transition(held, ("adamw", "sgd"), at_half)
    start = float(sum(parameter.detach().square().sum() for parameter in held))
    assert float(optimizer.step(closure).detach()) == start
    assert calls == [True]
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in held)


def test_groups_may_be_added_split_and_replaced_between_steps():
    """Each part has one of the rates, and the parameters of one are other objects after the first step."""
    held, alone = parameters(), parameters()
    optimizer = OptimizerTransition(SGD(held[:2], 0.1), AdamW(held[:2], 0.1), lambda step: 0)
    other = SGD([{"params": alone[:1]}, {"params": alone[1:2], "lr": 0.3}, {"params": alone[2:], "lr": 0.2}], 0.1)
    run(optimizer, held, [0])
    for group in other.param_groups[1:]:
        group["lr"] = 0.1 if group is other.param_groups[1] else 0.0
    run(other, alone, [0])
    group = optimizer.param_groups[0]
    replaced = nn.Parameter(held[1].detach().clone())
    optimizer.state[replaced] = optimizer.state.pop(held[1])
    optimizer.param_groups = [{**group, "params": held[:1]}, {**group, "params": [replaced], "first_lr": 0.3}]
    optimizer.add_param_group({"params": held[2:], "first_lr": 0.2})
    other.param_groups[1]["lr"], other.param_groups[2]["lr"] = 0.3, 0.2
    held[1] = replaced
    assert_equal(run(optimizer, held, range(1, 4)), run(other, alone, range(1, 4)))
    assert [group["step"] for group in optimizer.param_groups] == [4, 4, 4]


def test_transitions_may_be_in_a_row():
    held, alone = parameters(), parameters()
    inner = OptimizerTransition(SGD(held, 0.1), AdamW(held, 0.1), lambda step: float(step > 1))
    optimizer = OptimizerTransition(inner, Lars(held, 0.1), lambda step: 0)
    twin = OptimizerTransition(SGD(alone, 0.1), AdamW(alone, 0.1), lambda step: float(step > 1))
    assert_equal(run(optimizer, held, range(4)), run(twin, alone, range(4)))
    assert [type(each) for each in flattened([optimizer, twin])] == [SGD, AdamW, Lars, SGD, AdamW]


def test_optimizers_of_whole_tensors_are_reached():
    held = parameters()
    sm3, sgd = SM3(held, 0.1), SGD(held, 0.1)
    optimizer = OptimizerTransition(sm3, sgd, at_half)
    optimizer.extra_dealings = dict
    assert sm3.extra_dealings is optimizer.extra_dealings is dict
    assert not hasattr(sgd, "extra_dealings")
    assert optimizer.collapsed("first_accumulator_1", (4, 3)) == {0}
    assert optimizer.collapsed("first_momentum_buffer", (4, 3)) == set()
    assert optimizer.collapsed("second_accumulator_1", (4, 3)) == set()


def test_names_of_parameters_stay_with_them():
    named = [(f"p{index}", parameter) for index, parameter in enumerate(parameters())]
    optimizer = OptimizerTransition(AdamW(named, 0.1), SGD(named, 0.1), at_half)
    run(optimizer, [parameter for _, parameter in named], range(2))
    assert [group["param_names"] for group in optimizer.state_dict()["param_groups"]] == [["p0", "p1", "p2"]]


def test_between_steps_the_two_hold_nothing():
    held = parameters()
    optimizer = transition(held, ("adagrad", "adamw"), at_half)
    run(optimizer, held, range(2))
    for each in optimizer.inner:
        assert not each.state
        assert not [parameter for group in each.param_groups for parameter in group["params"]]


@pytest.mark.parametrize("weight", [-0.1, 1.5, float("nan")])
def test_weights_outside_their_range_end_the_run_before_anything_moves(weight):
    held = parameters()
    optimizer = transition(held, ("adamw", "sgd"), lambda step: weight if step == 2 else 0.5)
    before = run(optimizer, held, range(2))
    with pytest.raises(ValueError, match=rf"gives {weight} in step 2\."):
        run(optimizer, held, [2])
    assert_equal(held, before)


def scheduled(held):
    optimizer = SGD(held, 0.1)
    LambdaLR(optimizer, lambda step: 1.0)
    return optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (LBFGS, "LBFGS evaluates the loss within its step"),
        (SparseAdam, "SparseAdam moves only rows"),
        (lambda held: SGD(held, 0.1, differentiable=True), r"SGD\(differentiable=True\)"),
        (scheduled, "A scheduler has been made for the SGD"),
        (lambda held: SGD(held[:2], 0.1), r"AdamW has groups of \[3\] parameters and SGD of \[2\]"),
        (lambda held: SGD(groups_of(held), 0.1), r"of \[3\] parameters and SGD of \[1, 2\]"),
        (lambda held: SGD(held[::-1], 0.1), r"parameter 0 of group 0 has shape \[4, 3\] in AdamW .* shape \[\] in SGD"),
    ],
)
def test_what_cannot_be_half_of_a_transition_is_refused(make, message):
    held = parameters()
    with pytest.raises(ValueError, match=message):
        OptimizerTransition(AdamW(held, 0.1), make(held), at_half)


def test_one_optimizer_is_not_two():
    optimizer = SGD(parameters(), 0.1)
    with pytest.raises(ValueError, match="same object"):
        OptimizerTransition(optimizer, optimizer, at_half)


def test_what_acts_on_one_of_the_two_later_is_refused():
    held = parameters()
    optimizer = transition(held, ("adamw", "sgd"), at_half)
    LambdaLR(optimizer.inner[0], lambda step: 1.0)
    with pytest.raises(ValueError, match="A scheduler has been made for the AdamW"):
        run(optimizer, held, [0])
    optimizer = OptimizerTransition(Driven(held, 0.1), SGD(held, 0.1), at_half)
    with pytest.raises(RuntimeError, match=r"Driven has set its own lr from 0\.1 to 0\.05"):
        run(optimizer, held, [0])


def test_what_is_no_optimizer_or_schedule_is_refused():
    held = parameters()
    with pytest.raises(ValueError, match="from one optimizer to another, and got"):
        OptimizerTransition(SGD, SGD(held, 0.1), lambda step: 0)
    with pytest.raises(ValueError, match=r"schedule=0.5 must give the weight"):
        OptimizerTransition(SGD(held, 0.1), SGD(held, 0.1), 0.5)


def test_another_half_is_refused_when_states_are_loaded():
    held = parameters()
    saved = OptimizerTransition(AdamW(held), SGD(held, 0.1), lambda step: 0).state_dict()
    with pytest.raises(ValueError, match="is of no OptimizerTransition"):
        OptimizerTransition(Lamb(held), SGD(held, 0.1), lambda step: 0).load_state_dict(saved)


def test_the_last_weight_is_there_to_be_logged():
    held = parameters()
    optimizer = OptimizerTransition(SGD(held, 0.1), SGD(held, 0.1), lambda step: step / 4)
    assert optimizer.last_weight is None
    run(optimizer, held, range(3))
    assert optimizer.last_weight == 0.5
