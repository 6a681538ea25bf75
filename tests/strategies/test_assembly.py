import os
import random
from unittest.mock import patch

import numpy
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn

from lightning_hybrid.parallel.mesh import Layout
from lightning_hybrid.strategies.assembling import assemble
from lightning_hybrid.strategies.layouts import choose_layout, choose_stages
from lightning_hybrid.strategies.optimizers import ParameterGroups
from lightning_hybrid.strategies.survey import survey
from tests.launch import run_ranks

CPU = torch.device("cpu")
OPTIONS = {
    "pipeline_parallel_size": "auto",
    "tensor_parallel_size": 1,
    "num_chunks": 1,
    "num_microbatches": "auto",
    "schedule": "auto",
    "pipeline_layers": None,
    "partition": "balanced",
    "zero_stage": 1,
    "replicate_size": 1,
    "cpu_offload": False,
    "accumulate_on_cpu": False,
    "reduce_dtype": "auto",
}
BLOCKS = [f"blocks.{i}" for i in range(4)]


class Module(LightningModule):
    def __init__(self, depth=4, head=1, inlet=None):
        super().__init__()
        self.embed = nn.Embedding(100, 2)
        self.inlet = nn.Linear(2, inlet, bias=False) if inlet else nn.Identity()
        self.blocks = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(depth))  # 4 parameters each
        self.head = nn.Linear(2, head, bias=False)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(2, 2, 2, batch_first=True), 1)
        self.register_buffer("offset", torch.zeros(2))
        self.register_buffer("positions", torch.arange(3).expand(1, -1), persistent=False)


def sizes_of(module, partition, stages, blocks=BLOCKS):
    return choose_stages({"partition": partition}, module, blocks, stages).sizes


def plain(**options):
    module = Module(**options)
    del module.encoder
    return module


def test_parts_outside_the_blocks_weigh_on_the_end_where_they_stand():
    assert sizes_of(plain(head=1), "balanced", 2) == [2, 2]
    assert sizes_of(plain(head=4), "balanced", 2) == [3, 1]  # the head costs as much as two blocks
    assert sizes_of(plain(inlet=4), "balanced", 2) == [1, 3]
    assert sizes_of(plain(head=4), "uniform", 2) == [2, 2]
    assert sizes_of(plain(head=4), (1, 3), 2) == [1, 3]


def test_an_embedding_only_looks_up_and_costs_nothing():
    module = plain()
    assert module.embed.weight.numel() > 40 * 4
    assert sizes_of(module, "balanced", 4) == [1, 1, 1, 1]


@pytest.mark.parametrize(("partition", "stages"), [([2, 1], 2), ([2, 2], 4), ("uniform", 5), ("balanced", 5)])
def test_partitions_that_do_not_fit_are_refused(partition, stages):
    with pytest.raises(ValueError, match="4"):
        sizes_of(plain(), partition, stages)


@pytest.mark.parametrize(
    ("world", "options", "number", "layout"),
    [
        (4, {}, 4, Layout(2, 2)),
        (6, {}, 2, Layout(2, 3)),
        (9, {}, 4, Layout(3, 3)),
        (4, {}, 1, Layout(1, 4)),
        (5, {}, 4, Layout(1, 5)),  # a prime above the number of blocks
        (1, {}, 4, Layout(1, 1)),
        (4, {"pipeline_parallel_size": 4}, 4, Layout(4, 1)),
        (4, {"pipeline_parallel_size": 1}, 0, Layout(1, 4)),
    ],
)
def test_the_layout_fills_the_world(world, options, number, layout):
    assert choose_layout({**OPTIONS, **options}, BLOCKS[:number], world) == layout


@pytest.mark.parametrize(
    ("world", "options", "number", "message"),
    [
        (4, {"pipeline_parallel_size": 2}, 0, "has no nn.ModuleList or nn.Sequential with two elements"),
        (3, {"num_chunks": 2}, 2, "num_chunks=2 needs a pipeline, and 3 processes with 2 blocks make none"),
        (3, {"pipeline_parallel_size": 2}, 4, "world_size=3 is not a multiple"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(world, options, number, message):
    with pytest.raises(ValueError, match=message):
        choose_layout({**OPTIONS, **options}, BLOCKS[:number], world)


def draws():
    return torch.rand(1).item(), random.random(), numpy.random.rand()


def assembled():
    rank = dist.get_rank()
    torch.manual_seed(100 + rank), random.seed(rank), numpy.random.seed(rank)
    module = Module()  # other weights on every rank
    module.offset.fill_(rank + 5)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    first = module.embed.weight.detach().clone()
    keys = list(module.state_dict())
    ground = survey(module, {**OPTIONS, "pipeline_layers": "blocks"}, CPU, None)
    streams = draws()
    with patch.dict(os.environ, {"PL_GLOBAL_SEED": "3"}):
        torch.manual_seed(7)
        again = survey(module, {**OPTIONS, "pipeline_layers": "blocks"}, CPU, None)
        resumed = survey(module, {**OPTIONS, "pipeline_layers": "blocks"}, CPU, None, seed=11)
        kept = torch.initial_seed()
    assembly = assemble(module, OPTIONS, ground, ParameterGroups([optimizer], module))
    return {
        "seeds": (ground.seed, again.seed, kept, resumed.seed),
        "streams": streams,
        "ground": (ground.mesh.layout, ground.blocks, ground.sizes),
        "embedding": (first, module.embed.weight.detach()),
        "offset": module.offset.tolist(),
        "keys": list(assembly.outline.shapes) == keys,
        "optimized": sum(p.numel() for group in optimizer.param_groups for p in group["params"]),
        "here": sum(p.numel() for p in module.parameters()),
        "nested": module.encoder.use_nested_tensor,
        "stages": assembly.engine.num_stages,
    }


@pytest.fixture(scope="module")
def results():
    return run_ranks(4, assembled)


def test_every_rank_starts_from_rank_0s_weights_and_seed_and_keeps_its_part(results):
    whole = sum(p.numel() for p in Module().parameters())
    for rank, result in enumerate(results):
        assert result["seeds"] == (100, 7, 7, 11)
        assert result["ground"] == (Layout(2, 2), BLOCKS, [3, 1])  # the encoder stands behind the blocks
        assert torch.equal(result["embedding"][1], results[0]["embedding"][0])
        assert result["offset"] == [5, 5]
        assert result["keys"]
        assert result["optimized"] == result["here"] == whole - 4 * (1 if rank < 2 else 3)
        assert not result["nested"]
        assert result["stages"] == 2


def laid_out():
    """What a survey says with a tensor axis, and which runs of blocks it finds."""
    module, said = plain(), []
    options = {
        **OPTIONS,
        "pipeline_parallel_size": 1 if dist.get_world_size() == 2 else 2,
        "tensor_parallel_size": 2,
        "tensor_parallel_plan": {"blocks.*": "replicated"},
        "sequence_parallel": "regather",
    }
    with patch("lightning_hybrid.strategies.survey.rank_zero_info", said.append):
        ground = survey(module, options, CPU, None)
    return ground.runs, [assignment.module for assignment in ground.assignments], said


@pytest.mark.filterwarnings("ignore:tensor_parallel_size=. splits nothing")
@pytest.mark.parametrize(("size", "runs"), [(2, [BLOCKS]), (4, [BLOCKS[:2], BLOCKS[2:]])])
def test_the_layout_and_the_tensor_plan_are_shown_once(size, runs):
    for found, modules, said in run_ranks(size, laid_out):
        assert found == runs
        assert modules == BLOCKS
        assert said[0].startswith(f"hybrid_ptdp: pipeline {size // 2} x data 1 x tensor 2 (sequence_parallel regather)")
        assert sum("blocks.{0..3}" in text for text in said) == 1


def test_stages_of_a_replica_draw_alike_and_replicas_do_not(results):
    streams = [result["streams"] for result in results]
    assert streams[0] == streams[2]
    assert streams[1] == streams[3]
    assert all(a != b for a, b in zip(streams[0], streams[1], strict=True))


def alone():
    module = plain()
    ground = survey(module, {**OPTIONS, "num_microbatches": 2}, CPU, None)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    survey(module, OPTIONS, CPU, None)
    assembly = assemble(module, OPTIONS, ground, None)
    assembly.settle()
    return (
        torch.equal(torch.rand(1), expected),
        assembly.engine.cut,
        ground.sizes,
        list(assembly.engine.ownership.holders),
    )


def test_one_process_is_not_cut_and_keeps_its_streams():
    ((same, cut, sizes, names),) = run_ranks(1, alone)
    assert same
    assert cut is None
    assert sizes == []
    assert set(names) == set(dict(plain().named_parameters()))
