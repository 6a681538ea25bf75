"""Optimizers that begin anew step as new ones do, to the bit; chosen entries begin as they do in new ones."""

from functools import partial

import pytest
import torch
from torch import nn, optim

from lightning_hybrid.optim import SM3, Adafactor, Lamb, Lars, OptimizerTransition, RMSpropToSGD
from lightning_hybrid.optim.restarting import entries_of, forget_all, forget_entries, made_by_constructor

BEFORE, AFTER = 3, 3  # steps
ADAGRAD = {"lr": 0.1, "initial_accumulator_value": 0.5, "lr_decay": 0.1}


def transition(params, first=None):
    params = list(params)
    first = first(params) if first is not None else optim.Adagrad(params, **ADAGRAD)
    return OptimizerTransition(first, optim.NAdam(params, lr=0.01), lambda step: min(1.0, step / 8))


OPTIMIZERS = {
    "sgd": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "sgd-nesterov": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd-fused": partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "sgd-plain": partial(optim.SGD, lr=0.1),
    "adam": partial(optim.Adam, lr=0.1, amsgrad=True),
    "adam-fused": partial(optim.Adam, lr=0.1, fused=True),
    "adamw-foreach": partial(optim.AdamW, lr=0.1, foreach=True),
    "adagrad": partial(optim.Adagrad, **ADAGRAD),
    "adagrad-fused": partial(optim.Adagrad, lr=0.1, initial_accumulator_value=0.5, fused=True),
    "adadelta": optim.Adadelta,
    "adamax": partial(optim.Adamax, lr=0.1),
    "asgd": partial(optim.ASGD, lr=0.1, t0=2.0, lambd=0.1),
    "lbfgs": partial(optim.LBFGS, lr=0.5, max_iter=3),
    "nadam": partial(optim.NAdam, lr=0.1),
    "radam": partial(optim.RAdam, lr=0.1),
    "rmsprop": partial(optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "rprop": partial(optim.Rprop, lr=0.01),
    "torch-adafactor": partial(optim.Adafactor, lr=0.1),
    "muon": partial(optim.Muon, lr=0.1),
    "lars": partial(Lars, lr=0.5, momentum=0.9, trust_coefficient=0.1),
    "lamb": partial(Lamb, lr=0.05, eps=1e-3),
    "adafactor": partial(Adafactor, lr=0.05, min_dim_size_to_factor=2),
    "sm3": partial(SM3, lr=0.1, momentum=0.9),
    "rmsprop-to-sgd": partial(RMSpropToSGD, lr=0.05, steps_per_epoch=1, center=2.0, period=3.0),
    "transition": transition,
    "transition-of-transition": partial(transition, first=transition),
}


class Net(nn.Module):
    def __init__(self, only_matrices=False):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(3, 4, bias=not only_matrices), nn.Linear(4, 2, bias=not only_matrices)
        self.double()


def steps(module, optimizer, first, number):
    """Steps whose gradients depend on the weights and the number of the step."""
    for step in range(first, first + number):

        def closure(step=step):
            optimizer.zero_grad()
            x = torch.arange(15.0, dtype=torch.float64).view(5, 3).sin() * (1 + step)
            loss = module.two(torch.tanh(module.one(x))).sub(1).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def options(group):
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def run(make, restart):
    """Weights, and the final state in order, with something in the middle."""
    module = Net(only_matrices=make.func is optim.Muon if isinstance(make, partial) else False)
    optimizer = make(module.parameters())
    made = made_by_constructor(optimizer)
    steps(module, optimizer, 0, BEFORE)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] / 2  # as a schedule does
    optimizer = restart(module, optimizer, made)
    steps(module, optimizer, BEFORE, AFTER)
    return list(module.parameters()), [optimizer.state.get(p, {}) for p in module.parameters()]


def new(make, module, optimizer, made):
    fresh = make(module.parameters())
    for group, old in zip(fresh.param_groups, optimizer.param_groups, strict=True):
        group.update(options(old))
    return fresh


def cleared(module, optimizer, made):
    forget_all(optimizer, made)
    return optimizer


def every_entry(module, optimizer, made):
    forget_entries(optimizer, entries_of(optimizer))
    return optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_next_steps_are_those_of_a_new_optimizer(name):
    make = OPTIMIZERS[name]
    expected = run(make, partial(new, make))
    torch.testing.assert_close(run(make, cleared), expected, rtol=0, atol=0)
    if name != "lbfgs":
        torch.testing.assert_close(run(make, every_entry), expected, rtol=0, atol=0)
    if name != "sgd-plain":  # it has nothing to forget
        kept = run(make, lambda module, optimizer, made: optimizer)
        assert any(not torch.equal(a, b) for a, b in zip(kept[0], expected[0], strict=True))


def test_states_of_sparse_gradients_begin_anew():
    def run_sparse(restart):
        table = nn.Embedding(4, 2, sparse=True, _weight=torch.ones(4, 2))
        optimizer = optim.SparseAdam(table.parameters(), lr=0.1)
        for step in range(4):
            if step == 2:
                optimizer = restart(optimizer, table)
            optimizer.zero_grad()
            table(torch.tensor([step % 3, 1])).square().sum().backward()
            optimizer.step()
        return table.weight

    def clear(optimizer, table):
        forget_all(optimizer, [{}])
        return optimizer

    expected = run_sparse(lambda optimizer, table: optim.SparseAdam(table.parameters(), lr=0.1))
    assert torch.equal(run_sparse(clear), expected)


def test_other_entries_stay_and_memory_is_used_again():
    module = Net()
    optimizer = OPTIMIZERS["adam"](module.parameters())
    steps(module, optimizer, 0, 2)
    before = {p: dict(state) for p, state in optimizer.state.items()}
    values = {p: state["exp_avg_sq"].clone() for p, state in optimizer.state.items()}
    forget_entries(optimizer, {"exp_avg"})
    for parameter, state in optimizer.state.items():
        assert state["exp_avg"] is before[parameter]["exp_avg"]
        assert not state["exp_avg"].any()
        assert torch.equal(state["exp_avg_sq"], values[parameter])
        assert state["step"] == 2


def test_what_a_constructor_makes_is_found_in_each_group():
    module = Net()
    groups = [
        {"params": module.one.parameters()},
        {"params": module.two.parameters(), "initial_accumulator_value": 2.0},
    ]
    optimizer = optim.Adagrad(groups, **ADAGRAD)
    made = made_by_constructor(optimizer)
    assert made == [{"step": 0.0, "sum": 0.5}, {"step": 0.0, "sum": 0.5}]  # torch does not ask the group
    steps(module, optimizer, 0, 2)
    forget_entries(optimizer, {"sum"})
    assert all((state["sum"] == 0.5).all() and state["step"] == 2 for state in optimizer.state.values())
    assert made_by_constructor(OPTIMIZERS["adam"](module.parameters())) == [{}]


class Strange(optim.SGD):
    """Asks for something that no group tells, and has states at once."""

    def __init__(self, params, table, **options):
        super().__init__(params, **options)
        self.state[self.param_groups[0]["params"][0]]["seen"] = table


def test_what_cannot_begin_anew_is_refused():
    with pytest.raises(ValueError, match=r"Strange has states before the first step, .*'table'.* Name the entries"):
        made_by_constructor(Strange(Net().parameters(), table=[1], lr=0.1))
    module = Net()
    optimizer = OPTIMIZERS["lbfgs"](module.parameters())
    steps(module, optimizer, 0, 2)
    with pytest.raises(TypeError, match=r"LBFGS keeps 'old_dirs' as a list, which has no zero. Leave keys out"):
        forget_entries(optimizer, {"old_dirs"})
