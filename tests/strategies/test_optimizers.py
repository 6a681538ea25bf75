import gc
import weakref
from functools import partial

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn

from lightning_hybrid.callbacks import WeightDecayRules
from lightning_hybrid.optim import OptimizerTransition, linear_schedule
from lightning_hybrid.strategies.optimizers import ParameterGroups
from tests.small import WIDTH, Small


class Model(nn.Module):
    """The head is tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.body = nn.Linear(2, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight


def parts(model):
    return [list(model.embed.parameters()), list(model.body.parameters())]


def train(optimizer, model):
    for number, parameter in enumerate(model.parameters(), 1):
        parameter.grad = torch.full_like(parameter, float(number))
    optimizer.step()


def two_groups(kind=torch.optim.SGD, **options):
    model = Model()
    first, second = parts(model)
    optimizer = kind([{"params": first, "lr": 0.5}, {"params": second}], lr=0.1, **options)
    return model, optimizer, ParameterGroups([optimizer], model)


def test_groups_know_their_parameters_by_name_and_shared_ones_by_the_first():
    model, _, groups = two_groups()
    assert groups.names == [[["embed.weight"], ["body.weight", "body.bias"]]]
    tied = torch.optim.SGD([model.head.weight], 0.1)
    assert ParameterGroups([tied], model).names == [[["embed.weight"]]]


def test_each_group_keeps_its_options_and_what_is_here_in_order():
    model, optimizer, groups = two_groups()
    kept = dict(model.named_parameters())
    del kept["body.weight"]
    groups.keep(kept)
    assert [[id(p) for p in group["params"]] for group in optimizer.param_groups] == [
        [id(model.embed.weight)], [id(model.body.bias)]
    ]  # fmt: skip
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    assert groups.names == [[["embed.weight"], ["body.weight", "body.bias"]]]  # still the whole model's


def test_a_group_may_become_empty_and_the_optimizer_still_steps():
    model, optimizer, groups = two_groups()
    groups.keep({"embed.weight": model.embed.weight})
    before = model.body.weight.clone()
    train(optimizer, model)
    assert optimizer.param_groups[1]["params"] == []
    assert torch.equal(model.body.weight, before)
    groups.keep({})
    optimizer.step()


def test_replaced_parameters_take_their_state_along_and_dropped_ones_lose_it():
    model, optimizer, groups = two_groups(torch.optim.AdamW)
    train(optimizer, model)
    old = dict(model.named_parameters())
    momentum = optimizer.state[old["embed.weight"]]["exp_avg"]
    bias_state = optimizer.state[old["body.bias"]]
    new = {"embed.weight": nn.Parameter(torch.zeros(4, 2)), "body.bias": old["body.bias"]}
    groups.keep(new)
    assert optimizer.state[new["embed.weight"]]["exp_avg"] is momentum
    assert optimizer.state[old["body.bias"]] is bias_state
    assert set(map(id, optimizer.state)) == set(map(id, new.values()))
    again = {**new, "embed.weight": nn.Parameter(torch.zeros(4, 2))}
    groups.keep(again)  # a second time, from what was kept before
    assert optimizer.state[again["embed.weight"]]["exp_avg"] is momentum
    assert [group["params"] for group in optimizer.param_groups] == [[again["embed.weight"]], [again["body.bias"]]]


def test_names_that_the_user_gave_stay_beside_their_parameters():
    root = nn.Module()
    root.model = Model()
    optimizer = torch.optim.SGD(root.model.named_parameters(), 0.1)
    groups = ParameterGroups([optimizer], root)
    assert groups.names == [[["model.embed.weight", "model.body.weight", "model.body.bias"]]]
    assert groups.given == [[["embed.weight", "body.weight", "body.bias"]]]
    groups.keep({"model.body.bias": root.model.body.bias, "model.embed.weight": root.model.embed.weight})
    assert optimizer.param_groups[0]["param_names"] == ["embed.weight", "body.bias"]
    assert groups.given == [[["embed.weight", "body.weight", "body.bias"]]]
    groups.keep({"model.body.bias": root.model.body.bias})
    assert optimizer.param_groups[0]["param_names"] == ["body.bias"]


def test_optimizers_without_names_get_none():
    model, optimizer, groups = two_groups()
    groups.keep(dict(model.named_parameters()))
    assert groups.given == [[None, None]]
    assert all("param_names" not in group for group in optimizer.param_groups)


def test_several_optimizers_are_kept_apart():
    model = Model()
    optimizers = [torch.optim.SGD(part, 0.1) for part in parts(model)]
    groups = ParameterGroups(optimizers, model)
    groups.keep({"body.weight": model.body.weight})
    assert [len(optimizer.param_groups[0]["params"]) for optimizer in optimizers] == [0, 1]
    assert groups.names == [[["embed.weight"]], [["body.weight", "body.bias"]]]
    assert ParameterGroups([], model).names == []


def test_a_tensor_that_is_no_parameter_of_the_model_is_refused():
    model = Model()
    stray = nn.Parameter(torch.zeros(3, 5))
    with pytest.raises(ValueError, match=r"Adam holds a tensor of shape \[3, 5\] that is not a parameter"):
        ParameterGroups([torch.optim.Adam([*model.parameters(), stray])], model)


def test_frozen_parameters_stay_in_their_group():
    model = Model()
    model.body.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    groups = ParameterGroups([optimizer], model)
    groups.keep(dict(model.named_parameters()))
    assert optimizer.param_groups[0]["params"] == list(model.parameters())


def test_states_that_are_made_with_the_optimizer_are_cut_like_their_parameters():
    model, optimizer, groups = two_groups(torch.optim.Adagrad, initial_accumulator_value=0.5)
    groups.take(lambda name, value: value[:1] if name == "body.weight" and value.ndim else value)
    states = [optimizer.state[parameter] for parameter in model.parameters()]
    assert [tuple(state["sum"].shape) for state in states] == [(4, 2), (1, 2), (2,)]
    assert all(state["sum"].eq(0.5).all() and state["step"] == 0 for state in states)


def test_a_transition_gives_up_what_is_not_here_and_lets_go_of_it():
    """Its two optimizers refer to parameters too, which would keep the whole model in memory."""
    model = Model()
    first, second = ([{"params": part} for part in parts(model)] for _ in range(2))
    optimizer = OptimizerTransition(torch.optim.AdamW(first), torch.optim.SGD(second, 0.1), linear_schedule(0, 4))
    train(optimizer, model)
    gone = weakref.ref(model.body.weight)
    ParameterGroups([optimizer], model).keep({"embed.weight": model.embed.weight})
    del model.body, first, second
    gc.collect()
    assert gone() is None
    train(optimizer, model)
    assert list(optimizer.state) == [model.embed.weight]


def test_an_option_for_many_tensors_counts_in_a_transition_too():
    model = Model()
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    first, second = torch.optim.SGD(model.parameters(), 0.1), torch.optim.AdamW(model.parameters(), foreach=True)
    groups = ParameterGroups([OptimizerTransition(first, second, linear_schedule(0, 4))], model)
    with pytest.raises(ValueError, match=r"OptimizerTransition\(second_foreach=True\) has scale \(1 in all\)"):
        groups.check_unmixed(model, None)


class Late(Small):
    """Makes a layer when Lightning asks for it."""

    def configure_model(self):
        self.late = nn.Linear(WIDTH, WIDTH)


@pytest.mark.filterwarnings("ignore:.*configure_optimizers. will be overridden")
@pytest.mark.parametrize("has_rules", [False, True])
def test_what_lightning_cli_makes_the_optimizer_without_is_refused(has_rules, monkeypatch):
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of what LightningCLI calls
    monkeypatch.setattr(
        "sys.argv", ["fit.py", "--trainer.logger", "false", "--optimizer", "SGD", "--optimizer.lr", "0.1"]
    )
    for kind in (Small, Late):
        cli = LightningCLI(kind, run=False, save_config_callback=None, seed_everything_default=0)
        if has_rules:
            WeightDecayRules({"*.bias": 0}).setup(cli.trainer, cli.model, "fit")
        groups = partial(ParameterGroups, [torch.optim.SGD(cli.model.parameters(), 0.1)])
        assert len(groups(cli.model).names[0][0]) == 16
        cli.model.configure_model()
        if kind is Late:
            with pytest.raises(ValueError, match=r"SGD before configure_model made late.weight, late.bias \(2 in all"):
                groups(cli.model)
