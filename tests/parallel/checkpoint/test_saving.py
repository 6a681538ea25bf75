from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_hybrid.parallel.checkpoint.saving import gather_model_state, gather_optimizer_state, whole
from lightning_hybrid.parallel.mesh import Layout, Mesh
from lightning_hybrid.parallel.pipeline.cut import StageCut
from lightning_hybrid.parallel.pipeline.ownership import settle
from lightning_hybrid.parallel.pipeline.plan import Needs
from lightning_hybrid.strategies.optimizers import ParameterGroups
from tests.launch import run_ranks

CPU = torch.device("cpu")


class Counting(nn.Linear):
    """A block with a buffer, and state that is no tensor."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("calls", torch.tensor(0))

    def get_extra_state(self):
        return {"note": "kept"}

    def set_extra_state(self, state):
        pass


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.blocks = nn.ModuleList(Counting() for _ in range(4))
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor(0.0))
        self.register_buffer("fixed", torch.tensor(5.0))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)


def made(model=Model):
    torch.manual_seed(2)
    return model()


NEEDS = [
    Needs({"embed.weight"}, {"embed"}),
    Needs({"embed.weight", "norm.weight", "norm.bias"}, {"norm", "head"}, {"seen"}),
]


def engine_of(root, *, blocks="blocks.{}", sizes=(2, 2), chunks=1, needs=NEEDS):
    mesh = Mesh(Layout(2, 1), device=CPU)
    names = [blocks.format(i) for i in range(4)]
    cut = StageCut(root, names, sizes, pipeline=2, rank=mesh.rank, device=CPU)
    ownership = None if needs is None else settle(cut, mesh, {stage: needs[stage] for stage in cut.stages})
    return SimpleNamespace(
        root=root,
        cut=cut,
        mesh=mesh,
        ownership=ownership,
        tensor=None,
        experts=None,
        named_parameters=lambda: cut.parameters,
        share=lambda name: None,
        deals_out=lambda *args: False,
    )


def model_state(needs):
    root = made()
    keys = list(root.state_dict())
    engine = engine_of(root, needs=needs)
    for i, block in enumerate(root.blocks):
        block.calls.fill_(10 * engine.mesh.rank + i)
    root.norm.running_mean.fill_(engine.mesh.rank)
    root.seen.fill_(engine.mesh.rank)
    if engine.mesh.rank == 0:
        with pytest.raises(RuntimeError, match=r"No rank has \['a', 'b'\] \(2 of"):
            gather_model_state(engine, [*keys, "a", "b"])
    else:
        assert gather_model_state(engine, [*keys, "a", "b"]) == {}
    return gather_model_state(engine, keys)


@pytest.mark.parametrize("needs", [NEEDS, None], ids=["settled", "before the first step"])
def test_the_state_is_the_whole_models_on_rank_0_and_empty_elsewhere(needs):
    state, elsewhere = run_ranks(2, model_state, needs)
    reference = made().state_dict()
    assert elsewhere == {}
    assert list(state) == list(reference)
    for name, value in reference.items():
        if "calls" not in name and name not in ("norm.running_mean", "seen") and isinstance(value, torch.Tensor):
            assert torch.equal(state[name], value), name
    assert [state[f"blocks.{i}.calls"].item() for i in range(4)] == [0, 1, 12, 13]
    assert state["blocks.3._extra_state"] == {"note": "kept"}
    if needs is not None:
        assert state["norm.running_mean"].tolist() == [1, 1]
        assert state["seen"].item() == 1
    made().load_state_dict(state)


def tied_blocks():
    """Blocks 1 and 2 share a weight; its owner, rank 0, has it under the second name."""
    found = []
    for chunked, needs in [((1, 1, 1, 1), [Needs()] * 4), ((2, 2), [Needs()] * 2)]:
        torch.manual_seed(2)
        root = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
        root[2].weight = root[1].weight
        keys = list(root.state_dict())
        optimizer = torch.optim.SGD(root.parameters(), 0.1, momentum=0.9)
        groups = ParameterGroups([optimizer], root)
        engine = engine_of(root, blocks="{}", sizes=chunked, needs=needs)
        groups.keep(engine.cut.parameters)
        for number, name in enumerate(engine.cut.names):
            if name in engine.cut.parameters:
                engine.cut.parameters[name].grad = torch.full_like(engine.cut.parameters[name], number)
        optimizer.step()
        state = gather_optimizer_state(engine, optimizer, groups.names[0], groups.given[0])
        found.append((gather_model_state(engine, keys), state))
    return found


def test_a_parameter_tied_over_stages_is_saved_under_both_names():
    for state, optimizer in run_ranks(2, tied_blocks)[0]:
        assert list(state) == [f"{i}.{kind}" for i in range(4) for kind in ("weight", "bias")]
        assert torch.equal(state["1.weight"], state["2.weight"])
        momenta = [optimizer["state"][i]["momentum_buffer"].unique().tolist() for i in range(7)]
        assert momenta == [[number] for number in range(7)]


def optimizer_state(kind, options):
    root = made()
    named = options.pop("named", False)
    decayed = [item for item in root.named_parameters() if item[1].ndim > 1]
    rest = [item for item in root.named_parameters() if item[1].ndim == 1]
    pick = (lambda items: items) if named else (lambda items: [p for _, p in items])
    optimizer = kind(
        [{"params": pick(decayed), "weight_decay": 0.1}, {"params": pick(rest), "lr": 0.5}], lr=0.1, **options
    )
    groups = ParameterGroups([optimizer], root)
    engine = engine_of(root)
    groups.keep(engine.cut.parameters)
    step(optimizer, engine.cut.parameters)
    return gather_optimizer_state(engine, optimizer, groups.names[0], groups.given[0])


def step(optimizer, parameters):
    for name, parameter in parameters.items():
        if "blocks.1.bias" not in name:  # one has no gradient, so no state
            parameter.grad = torch.full_like(parameter, float(len(name)))
    optimizer.step()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9, "named": True}),
        (torch.optim.SGD, {}),
    ],
)
def test_optimizer_state_is_that_of_one_process(kind, options):
    root = made()
    named = options.get("named", False)
    decayed = [item for item in root.named_parameters() if item[1].ndim > 1]
    rest = [item for item in root.named_parameters() if item[1].ndim == 1]
    pick = (lambda items: items) if named else (lambda items: [p for _, p in items])
    rates = {key: value for key, value in options.items() if key != "named"}
    optimizer = kind(
        [{"params": pick(decayed), "weight_decay": 0.1}, {"params": pick(rest), "lr": 0.5}], lr=0.1, **rates
    )
    step(optimizer, dict(root.named_parameters()))
    expected = optimizer.state_dict()
    state, elsewhere = run_ranks(2, optimizer_state, kind, dict(options))
    assert elsewhere == {}
    assert state["param_groups"] == expected["param_groups"]
    torch.testing.assert_close(state["state"], expected["state"])
    optimizer.load_state_dict(state)


def wholes():
    mesh = init_device_mesh("cpu", (2,))
    tensor = torch.arange(6.0).view(3, 2)
    sharded = distribute_tensor(tensor, mesh, [Shard(0)])
    return whole(sharded).tolist(), type(whole(sharded)).__name__


def test_shards_are_gathered_and_other_things_pass():
    assert run_ranks(2, wholes) == [([[0, 1], [2, 3], [4, 5]], "Tensor")] * 2
    assert whole("text") == "text"
    assert whole(None) is None
    assert not whole(nn.Parameter(torch.ones(1))).requires_grad
