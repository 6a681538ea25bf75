import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_hybrid.optim import SM3, Adafactor, Lamb, Lars, OptimizerTransition, RMSpropToSGD, linear_schedule
from lightning_hybrid.parallel.checkpoint.loading import (
    WholeOptimizer,
    check_number,
    load_groups,
    load_model_state,
    load_optimizer_state,
)
from lightning_hybrid.parallel.checkpoint.states import Outline
from lightning_hybrid.parallel.pipeline.cut import StageCut
from lightning_hybrid.parallel.zero.shards import shard_like
from tests.launch import run_ranks

CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor(0.0))


def engine_of(root, rank):
    cut = StageCut(root, [f"blocks.{i}" for i in range(4)], (2, 2), pipeline=2, rank=rank, device=CPU)
    return SimpleNamespace(
        root=root,
        cut=cut,
        named_parameters=lambda: cut.parameters,
        part=lambda name, whole: whole,
        share=lambda name: None,
    )


def stepped(model):
    optimizer = torch.optim.AdamW(
        [{"params": model.blocks.parameters(), "lr": 0.1}, {"params": model.embed.parameters()}]
    )
    for number, parameter in enumerate(model.parameters(), 1):
        parameter.grad = torch.full_like(parameter, float(number))
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_takes_its_part_of_the_whole_state(rank):
    source, root = Model(), Model()
    source.seen.fill_(7)
    keys, outline = list(root.state_dict()), Outline.of(root)
    engine = engine_of(root, rank)
    load_model_state(engine, outline, source.state_dict(), strict=True)
    state = source.state_dict()
    for name, value in root.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert len(root.state_dict()) == len(keys) - 4
    assert root.head.weight is root.embed.weight


def test_names_that_do_not_fit_are_refused_unless_that_is_wanted():
    root = Model()
    outline, state = Outline.of(root), Model().state_dict()
    engine = engine_of(root, 0)
    state["strange"] = state.pop("seen")
    with pytest.raises(RuntimeError, match=r"does not fit Model: it lacks \['seen'\] \(1 keys\) and has \['strange'\]"):
        load_model_state(engine, outline, state, strict=True)
    load_model_state(engine, outline, state, strict=False)
    assert torch.equal(root.embed.weight, state["embed.weight"])


def test_other_shapes_are_refused_before_anything_is_loaded():
    root, state = Model(), Model().state_dict()
    outline = Outline.of(root)
    before = {name: value.clone() for name, value in root.state_dict().items()}
    state["embed.weight"] = state["head.weight"] = torch.ones(4, 2)
    with pytest.raises(RuntimeError, match=r"embed.weight has shape \[4, 2\] there and \[3, 2\] in the model"):
        load_model_state(engine_of(root, 0), outline, state, strict=True)
    assert all(torch.equal(value, before[name]) for name, value in root.state_dict().items())


def test_a_hook_may_change_shapes():
    root, state = Model(), Model().state_dict()
    outline = Outline.of(root)

    def cut(module, state, *args):
        state["embed.weight"] = state["head.weight"] = state["embed.weight"][:3]

    root.register_load_state_dict_pre_hook(cut)
    state["embed.weight"] = state["head.weight"] = torch.ones(4, 2)
    load_model_state(engine_of(root, 0), outline, state, strict=True)
    assert torch.equal(root.embed.weight, torch.ones(3, 2))


@pytest.mark.parametrize("rank", [0, 1])
def test_another_shape_is_refused_on_ranks_that_have_it_and_on_others(rank):
    root = Model()
    outline, state = Outline.of(root), Model().state_dict()
    engine = engine_of(root, rank)
    before = copy.deepcopy(root.state_dict())
    state["blocks.3.bias"] = torch.zeros(99)
    with pytest.raises(RuntimeError, match=r"blocks.3.bias has shape \[99\] there and \[\d\] in the model"):
        load_model_state(engine, outline, {**state, "seen": state["seen"] + 1}, strict=False)
    assert all(torch.equal(value, before[name]) for name, value in root.state_dict().items())


def load_whole(engine, optimizer, names, saved, saved_names):
    load_groups(optimizer, names, saved["param_groups"], saved_names)
    load_optimizer_state(engine, optimizer, WholeOptimizer(saved, saved_names or names))


NAMES = [[f"blocks.{i}.{leaf}" for i in range(4) for leaf in ("weight", "bias")], ["embed.weight"]]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("saved_names", [None, [NAMES[0][::-1], NAMES[1]]], ids=["in order", "by name"])
def test_each_parameter_gets_its_own_state_whatever_the_order(rank, saved_names):
    source = Model()
    optimizer = stepped(source)
    saved = copy.deepcopy(optimizer.state_dict())
    if saved_names:
        saved["param_groups"][0]["params"] = saved["param_groups"][0]["params"][::-1]
    saved["param_groups"][0]["lr"] = 0.7
    root = Model()
    engine = engine_of(root, rank)
    here = torch.optim.AdamW(
        [
            {"params": [p for n, p in engine.cut.parameters.items() if n in NAMES[0]], "lr": 0.5},
            {"params": root.embed.parameters()},
        ]
    )
    load_whole(engine, here, NAMES, saved, saved_names)
    expected = dict(source.named_parameters())
    assert [group["lr"] for group in here.param_groups] == [0.7, 1e-3]
    assert len(here.state) == 5
    for name, parameter in engine.cut.parameters.items():
        for key, value in here.state[parameter].items():
            assert torch.equal(value, optimizer.state[expected[name]][key]), (name, key)


def test_other_groups_are_refused_with_their_sizes():
    engine = engine_of(Model(), 0)
    saved = stepped(Model()).state_dict()
    with pytest.raises(ValueError, match=r"AdamW has groups of \[8, 1\] parameters and the present one has \[9\]"):
        load_whole(engine, torch.optim.AdamW(engine.root.parameters()), [NAMES[0] + NAMES[1]], saved, None)
    strange = [[name.replace("0", "9") for name in NAMES[0]], NAMES[1]]
    with pytest.raises(ValueError, match=r"without \['blocks.9.weight', 'blocks.9.bias'\]"):
        load_whole(engine, torch.optim.AdamW(engine.root.parameters()), NAMES, saved, strange)
    exchanged = [NAMES[1] + NAMES[0][1:], NAMES[0][:1]]
    with pytest.raises(ValueError, match=r"has \['blocks.0.weight', 'embed.weight'\] \(2 in all\) in other groups"):
        load_whole(engine, torch.optim.AdamW(engine.root.parameters()), NAMES, saved, exchanged)


def test_numbers_beside_parameters_keep_their_types():
    """Else NAdam's products, in float32, would go on in float64 and be others than those of a run without a stop."""
    model, engine = Model().double(), engine_of(Model().double(), 0)
    optimizer = torch.optim.NAdam([model.embed.weight], 0.1)
    model.embed.weight.grad = torch.ones_like(model.embed.weight)
    optimizer.step()
    here = torch.optim.NAdam([engine.cut.parameters["embed.weight"]], 0.1)
    load_whole(engine, here, [["embed.weight"]], copy.deepcopy(optimizer.state_dict()), None)
    torch.testing.assert_close(next(iter(here.state.values())), next(iter(optimizer.state.values())), rtol=0, atol=0)


def test_another_kind_of_optimizer_is_refused():
    engine = engine_of(Model(), 0)
    saved, parameters = stepped(Model()).state_dict(), [{"params": [p]} for p in engine.root.parameters()][:2]
    with pytest.raises(ValueError, match=r"has the options \['amsgrad', 'betas', .* and is no SGD"):
        load_whole(engine, torch.optim.SGD(parameters, 0.1), NAMES, saved, None)


def over(first, second):
    """A transition over one parameter."""
    return lambda members: OptimizerTransition(first(members), second(members), linear_schedule(1, 3))


SGD, AdamW = partial(torch.optim.SGD, lr=0.1), torch.optim.AdamW
MAKES = {
    "SGD": SGD,
    "RMSprop": torch.optim.RMSprop,
    "AdamW": AdamW,
    "Lars": partial(Lars, lr=0.1),
    "Lamb": Lamb,
    "Adafactor": Adafactor,
    "SM3": partial(SM3, lr=0.1),
    "RMSpropToSGD": partial(RMSpropToSGD, lr=0.1, steps_per_epoch=1),
    "to SGD": over(AdamW, SGD),
    "to SM3": over(AdamW, partial(SM3, lr=0.1)),
    "from SM3": over(partial(SM3, lr=0.1), SGD),
}


@pytest.mark.parametrize("here", MAKES)
def test_another_kind_is_refused_though_its_options_are_a_part_of_the_others(here):
    """Else SM3 would go on from momentum SGD with accumulators of 0, and SGD from SM3 with a buffer of other units."""
    for name, make in MAKES.items():
        optimizer, groups = MAKES[here]([Model().embed.weight]), make([Model().embed.weight]).state_dict()
        if name == here:
            load_groups(optimizer, [["embed.weight"]], groups["param_groups"], None)
            continue
        kinds = "|".join(type(each).__name__ for each in (optimizer, *getattr(optimizer, "inner", ())))
        with pytest.raises(ValueError, match=rf"has the options .* and is no ({kinds})\."):
            load_groups(optimizer, [["embed.weight"]], groups["param_groups"], None)


@pytest.mark.parametrize("changed", [{"initial_lr": 0.1}, {"decoupled_weight_decay": None}])
def test_options_of_schedulers_and_of_other_versions_are_taken(changed):
    optimizer = torch.optim.AdamW([Model().embed.weight])
    groups = optimizer.state_dict()["param_groups"]
    for key, value in changed.items():
        groups[0].pop(key, None)
        groups[0] |= {} if value is None else {key: value}
    load_groups(optimizer, [["embed.weight"]], groups, None)
    assert optimizer.param_groups[0].get("initial_lr") == changed.get("initial_lr")


def test_another_number_of_optimizers_is_refused():
    adamw = stepped(Model()).state_dict()
    with pytest.raises(ValueError, match=r"states of 2 optimizer\(s\), and configure_optimizers has made 1"):
        check_number([torch.optim.SGD(Model().parameters())], [adamw, adamw])


def test_a_stateless_optimizer_has_nothing_to_load():
    root = Model()
    engine = engine_of(root, 0)
    optimizer = torch.optim.SGD([engine.cut.parameters["embed.weight"]], 0.1)
    saved = torch.optim.SGD([Model().embed.weight], 0.3).state_dict()
    load_whole(engine, optimizer, [["embed.weight"]], saved, None)
    assert optimizer.param_groups[0]["lr"] == 0.3


def shards():
    mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(6.0).view(3, 2)
    like = distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)])
    part = shard_like(whole, like)
    assert isinstance(part, DTensor)
    assert part.to_local().untyped_storage().nbytes() == part.to_local().nbytes  # the whole may be let go of
    assert shard_like(torch.tensor(3.0), like).item() == 3.0
    assert shard_like("text", like) == "text"
    assert shard_like(part, like) is part
    assert shard_like(whole, torch.zeros(3, 2)) is whole
    return part.to_local().tolist()


def test_a_whole_tensor_is_cut_like_a_sharded_one_without_a_message():
    assert run_ranks(2, shards) == [[[0, 1], [2, 3]], [[4, 5]]]
    assert not dist.is_initialized()
