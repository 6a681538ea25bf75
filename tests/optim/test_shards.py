"""Optimizers on shards that DTensors tell of: the numbers of whole tensors, and checkpoints of torch's own."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing import assert_close

from lightning_hybrid.optim import SM3, Adafactor, Lamb, Lars
from tests.launch import run_ranks
from tests.optim.steps import SHAPES, draw, take_steps

MAKES = [
    partial(Lars, lr=0.1, weight_decay=0.1),
    partial(Lamb, lr=0.1, weight_decay=0.1),
    partial(Adafactor, lr=0.1, weight_decay=0.1, min_dim_size_to_factor=2),
    partial(SM3, lr=0.1, momentum=0.9, weight_decay=0.1),
]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same_as_whole(make, parameters, gradients, plain):
    """Steps on DTensors and on plain tensors give the same parameters and states."""
    optimizer, reference = make(parameters), make(plain)
    take_steps(optimizer, parameters, gradients)
    take_steps(reference, plain, gradients)
    assert_same(optimizer, parameters, reference, plain)


def assert_same(optimizer, parameters, reference, plain):
    """Made in float64, the two differ in the order in which some dozens of numbers are added up."""
    for parameter, expected in zip(parameters, plain, strict=True):
        assert_close(whole(parameter.detach()), expected.detach(), rtol=1e-9, atol=1e-12)
        states, of_plain = optimizer.state[parameter], reference.state[expected]
        assert states.keys() == of_plain.keys()
        for name, state in states.items():
            assert isinstance(state, DTensor) or name == "step"
            assert_close(whole(state), of_plain[name], rtol=1e-9, atol=1e-300)


def shards_do_as_wholes():
    """On each rank: all layouts of 2 or 4 ranks, lengths that do not divide."""
    size = dist.get_world_size()
    line = init_device_mesh("cpu", (size,))
    layouts = [(line, [Shard(0)]), (line, [Shard(1)])]
    if size == 4:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        layouts += [(grid, p) for p in ([Replicate(), Shard(0)], [Shard(0), Shard(1)], [Shard(0), Shard(0)])]
    for make in MAKES:
        for mesh, placements in layouts:
            least = 1 + max(p.dim for p in placements if p.is_shard())
            plain, gradients = draw([shape for shape in SHAPES if len(shape) >= least], 3)
            parameters = [nn.Parameter(distribute_tensor(p.detach(), mesh, placements)) for p in plain]
            assert_same_as_whole(make, parameters, gradients, plain)
        if size == 4:
            fully_sharded_and_split(make, grid)


def fully_sharded_and_split(make, grid):
    """What `fully_shard` makes of layers that are dealt out over a tensor axis: one dimension is sharded twice."""
    torch.manual_seed(0)
    plain, model = (nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3), nn.Tanh()).double() for _ in range(2))
    model.load_state_dict(plain.state_dict())
    parallelize_module(model, grid["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=grid["data"])
    assert [type(p).__name__ for p in model[0].weight.placements] == ["_StridedShard", "Shard"]
    optimizer, reference = make(model.parameters()), make(plain.parameters())
    for inputs in torch.randn(3, 4, 5, dtype=torch.float64):  # the same on all ranks
        for network, steps in ((model, optimizer), (plain, reference)):
            network(inputs).square().sum().backward()
            steps.step()
            steps.zero_grad()
    assert_same(optimizer, list(model.parameters()), reference, list(plain.parameters()))


def resume_to_the_bit(folder):
    """On each rank: states of sharded parameters go through torch.distributed.checkpoint into a fresh optimizer."""
    for number, make in enumerate(MAKES):
        resumes_to_the_bit(make, f"{folder}/{number}")


def resumes_to_the_bit(make, folder):
    first, second = build(make), build(make)
    train(*first, range(3))
    model, states = get_state_dict(*first)
    dcp.save({"model": model, "states": states}, checkpoint_id=folder)
    train(*first, range(3, 6))
    before = [whole(p.detach()).clone() for p in second[0].parameters()]
    model, states = get_state_dict(*second)  # this takes a step with a rate and gradients of 0
    assert all(torch.equal(whole(p.detach()), b) for p, b in zip(second[0].parameters(), before, strict=True))
    dcp.load({"model": model, "states": states}, checkpoint_id=folder)
    set_state_dict(*second, model_state_dict=model, optim_state_dict=states)
    train(*second, range(3, 6))
    for ours, theirs in zip(first[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(whole(ours.detach()), whole(theirs.detach()))
        for name, state in first[1].state[ours].items():
            assert torch.equal(whole(state), whole(second[1].state[theirs][name]))


def build(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 7))
    fully_shard(model)
    return model, make(model.parameters())


def train(model, optimizer, steps):
    for step in steps:
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("size", [2, 4])
def test_shards_do_as_wholes(size):
    run_ranks(size, shards_do_as_wholes)


def test_sharded_checkpoint_resumes_to_the_bit(tmp_path):
    run_ranks(2, resume_to_the_bit, str(tmp_path))
