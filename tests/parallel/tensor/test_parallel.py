"""Slices of parameters: which there are, and how states of them are made whole and taken apart."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_hybrid.functional.splits import Split
from lightning_hybrid.parallel.checkpoint.loading import WholeOptimizer, load_model_state, load_optimizer_state
from lightning_hybrid.parallel.checkpoint.saving import gather_model_state, gather_optimizer_state
from lightning_hybrid.parallel.checkpoint.states import Outline
from lightning_hybrid.parallel.engine import Engine
from lightning_hybrid.parallel.gradients import gradient_norm, local
from lightning_hybrid.parallel.mesh import Layout, Mesh
from lightning_hybrid.parallel.tensor.assignment import Assignment
from lightning_hybrid.parallel.tensor.axis import TensorAxis
from lightning_hybrid.parallel.tensor.parallel import TensorParallel, whole_tree
from lightning_hybrid.parallel.tensor.split_tensor import wrap
from lightning_hybrid.parallel.zero.zero import Zero
from lightning_hybrid.strategies.optimizers import ParameterGroups
from tests.launch import run_ranks

CPU = torch.device("cpu")
SPLITS = {"embed": Split(0, (7,)), "fused": Split(0, (3, 3, 3)), "down": Split(1, (6,))}  # no length is divisible by 2


class Model(nn.Module):
    """Tied embeddings, a fused projection, a matrix split on columns, and what stays whole."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(7, 3)
        self.fused, self.down, self.norm = nn.Linear(3, 9), nn.Linear(6, 3), nn.LayerNorm(3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor(2.0))


def assignments():
    fused = SPLITS["fused"]
    return [
        Assignment("embed", "vocab", {"weight": SPLITS["embed"]}),
        Assignment("fused", "fused_qkv", {"weight": fused, "bias": fused}),
        Assignment("down", "rowwise", {"weight": SPLITS["down"]}, ("bias",)),
        Assignment("norm", "sequence", {}, ("weight", "bias")),
    ]


def engine_of(root, layout):
    mesh = Mesh(layout, device=CPU)
    tensor = TensorParallel(root, assignments(), TensorAxis(mesh.tensor_group))
    return Engine(root, None, mesh, schedule="auto", num_chunks=1, zero=Zero(1), seed=0, tensor=tensor)


def fill(parameters):
    """The gradients of one process: of a split parameter its slice, on every rank."""
    for name, parameter in parameters:
        whole = torch.arange(parameter.numel(), dtype=parameter.dtype).view_as(parameter)
        parameter.grad = whole / (1 + len(name))


def trained(root, optimizer, tensor=None):
    """One step with gradients that depend on the place in the whole tensor."""
    gradients = {}
    whole = Model()
    fill(whole.named_parameters())
    for name, parameter in whole.named_parameters():
        gradients[name] = parameter.grad if tensor is None else tensor.part(name, parameter.grad)
    for name, parameter in root.named_parameters():
        parameter.grad = gradients[name].clone()
    optimizer.step()


def round_trip(data):
    root = Model()
    optimizer = torch.optim.AdamW(root.parameters(), 0.1, amsgrad=True)
    groups = ParameterGroups([optimizer], root)
    before = [id(parameter) for parameter in root.parameters()]
    engine = engine_of(root, Layout(1, data, 2))
    groups.keep(engine.named_parameters())
    same = (
        before
        == [id(parameter) for parameter in root.parameters()]
        == [id(p) for p in optimizer.param_groups[0]["params"]]
    )
    trained(root, optimizer, engine.tensor)
    norm = gradient_norm(engine.counted_parameters(), device=CPU).item()
    keys = list(Model().state_dict())
    if data > 1:  # shards are made of slices
        engine.settle()
        groups.keep(engine.named_parameters())
    model = gather_model_state(engine, keys)
    state = gather_optimizer_state(engine, optimizer, groups.names[0], groups.given[0])
    model, state = copy.deepcopy((model, state))  # in host memory they are the parameters themselves
    box = [model, state]
    dist.broadcast_object_list(box, 0)
    parts = {name: local(p).clone() for name, p in root.named_parameters()}
    moments = {n: local(optimizer.state[p]["exp_avg"]).clone() for n, p in engine.named_parameters().items()}
    with torch.no_grad():
        for parameter in root.parameters():
            local(parameter).fill_(9)
    optimizer.state.clear()
    load_model_state(engine, Outline.of(Model()), box[0], strict=True)
    load_optimizer_state(engine, optimizer, WholeOptimizer(box[1], groups.names[0]))
    restored = all(torch.equal(local(p), parts[name]) for name, p in root.named_parameters())
    for name, parameter in engine.named_parameters().items():
        restored &= torch.equal(local(optimizer.state[parameter]["exp_avg"]), moments[name])
        restored &= isinstance(optimizer.state[parameter]["exp_avg"], DTensor) == (data > 1)
    return same, norm, model, state, restored, parts["down.weight"].shape


@pytest.mark.parametrize("data", [1, 2])
def test_states_are_those_of_one_process_and_come_back_as_slices(data):
    reference = Model()
    optimizer = torch.optim.AdamW(reference.parameters(), 0.1, amsgrad=True)
    trained(reference, optimizer)
    expected = gradient_norm_of(reference)
    results = run_ranks(2 * data, round_trip, data)
    for rank, (same, norm, model, state, restored, _) in enumerate(results):
        assert same
        assert norm == pytest.approx(expected, rel=1e-6)
        assert restored
        assert bool(model) == bool(state) == (rank == 0)
    _, _, model, state, *_ = results[0]
    torch.testing.assert_close(model, dict(reference.state_dict()))
    torch.testing.assert_close(state, optimizer.state_dict())


def gradient_norm_of(model):
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()


def other_lengths():
    """A state that is as long as a slice must not be taken for one."""
    root = Model()
    engine = engine_of(root, Layout(1, 1, 2))
    state = dict(Model().state_dict())
    outline, messages = Outline.of(Model()), []
    for name, shape in [("down.weight", (3, 3)), ("embed.weight", (8, 3))]:
        with pytest.raises(RuntimeError) as caught:
            load_model_state(engine, outline, {**state, name: torch.zeros(shape)}, strict=False)
        messages.append(str(caught.value))
    return messages


def test_states_of_another_length_are_refused_with_both_shapes():
    for shorter, longer in run_ranks(2, other_lengths):
        assert "down.weight has shape [3, 3] there and [3, 6] in the model" in shorter
        assert "embed.weight has shape [8, 3] there and [7, 3] in the model" in longer


def about_slices():
    root = Model()
    tensor = TensorParallel(root, assignments(), TensorAxis(dist.group.WORLD))
    rank, whole = dist.get_rank(), Model()
    odd = torch.arange(2)
    return {
        "splits": sorted(tensor.splits),
        "deferred": sorted(tensor.deferred),
        "embed": torch.equal(root.embed.weight, whole.embed.weight[:4] if rank == 0 else whole.embed.weight[4:]),
        "tied": root.head.weight is root.embed.weight,
        "fused": torch.equal(root.fused.bias, whole.fused.bias[[0, 1, 3, 4, 6, 7] if rank == 0 else [2, 5, 8]]),
        "own": all(p.is_contiguous() and p._base is None for p in root.parameters()),
        "other": tensor.whole("norm.weight", odd, odd.device) is odd,
        "step": tensor.part("embed.weight", torch.tensor(3.0)).item(),
        "types": tensor.whole("fused.bias", root.fused.bias.detach().bfloat16(), odd.device).dtype,
        "trees": trees(tensor.axis),
    }


def trees(axis):
    split = Split(0, (3,))
    part = wrap(split.take(torch.arange(3.0), 2, axis.rank), split, axis)
    made = whole_tree({"scores": [part, 1]})
    plain = {"scores": torch.zeros(1)}
    return made["scores"][0].tolist(), type(made["scores"][0]).__name__, whole_tree(plain) is plain


def test_slices_are_plain_parameters_and_everything_else_passes():
    for result in run_ranks(2, about_slices):
        splits = ["down.weight", "embed.weight", "fused.bias", "fused.weight", "head.weight"]
        assert result["splits"] == splits
        assert result["deferred"] == ["down.bias", "norm.bias", "norm.weight"]
        assert all(result[key] for key in ("embed", "tied", "fused", "own", "other"))
        assert result["step"] == 3
        assert result["types"] is torch.bfloat16
        assert result["trees"] == ([0, 1, 2], "Tensor", True)


def deferred():
    """Each rank has a part of the gradients of deferred parameters, and the whole of others."""
    root = Model()
    engine = engine_of(root, Layout(1, 1, 2))
    root.norm.bias.requires_grad_(False)
    for parameter in root.parameters():
        parameter.grad = torch.full_like(parameter, 1.0 + dist.get_rank()) if parameter.requires_grad else None
    engine.sum_deferred_gradients()
    names = [name for name, p in root.named_parameters() if any(p is d for d in engine.deferred_parameters())]
    return names, {name: p.grad.unique().tolist() for name, p in root.named_parameters() if p.grad is not None}


def test_gradients_of_deferred_parameters_are_summed_and_of_no_others():
    for rank, (names, found) in enumerate(run_ranks(2, deferred)):
        assert names == ["down.bias", "norm.weight"]
        assert {name for name, values in found.items() if values == [3]} == set(names)
        assert all(values == [1 + rank] for name, values in found.items() if name not in names)


def dealt_out():
    root = Model()
    engine = engine_of(root, Layout(1, 1, 2))
    weight, bias = root.down.weight, root.down.bias  # slices of columns; whole
    states = {
        "moment": engine.deals_out("down.weight", weight, torch.zeros_like(weight)),
        "of rows": engine.deals_out("down.weight", weight, weight[:, :1], frozenset({1})),
        "of columns": engine.deals_out("down.weight", weight, weight[:1], frozenset({0})),
        "step": engine.deals_out("down.weight", weight, torch.tensor(1.0)),
        "count": engine.deals_out("down.weight", weight, 1),
        "of a whole": engine.deals_out("down.bias", bias, torch.zeros_like(bias)),
    }
    [dealing] = engine.dealings()[weight]
    return states, (dealing.dim, dealing.length), dealing.axis.reduce(torch.ones(2), "sum").tolist()


def test_states_are_dealt_out_along_the_dimensions_that_they_have():
    for states, dealing, total in run_ranks(2, dealt_out):
        assert [name for name, is_dealt in states.items() if is_dealt] == ["moment", "of columns"]
        assert dealing == (1, 6)
        assert total == [2, 2]
