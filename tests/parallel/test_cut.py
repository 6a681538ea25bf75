import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchmetrics import MeanMetric

from lightning_hybrid.parallel.pipeline.cut import StageCut, ancestors_of, outside_modules

CPU = torch.device("cpu")


class Decoder(nn.Module):
    """Embedding and head are one parameter; the final norm stands beside the blocks."""

    def __init__(self, depth=4):
        super().__init__()
        self.model = nn.Module()
        self.model.embed = nn.Embedding(5, 3)
        self.model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(depth))
        self.model.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.model.embed.weight
        self.act = nn.ReLU()
        self.register_buffer("step", torch.zeros(()))


BLOCKS = [f"model.blocks.{i}" for i in range(4)]


def cut_of(root, blocks=BLOCKS, sizes=(2, 2), pipeline=2, rank=0):
    return StageCut(root, blocks, sizes, pipeline=pipeline, rank=rank, device=CPU)


def block_parameters(*positions):
    return [f"model.blocks.{i}.{name}" for i in positions for name in ("0.weight", "0.bias", "1.weight", "1.bias")]


def test_each_rank_keeps_its_blocks_and_all_outside_of_them():
    for rank, kept in [(0, (0, 1)), (1, (2, 3))]:
        root = Decoder()
        cut = cut_of(root, rank=rank)
        outside = ["model.embed.weight", "model.norm.weight", "model.norm.bias"]
        assert set(cut.parameters) == {*outside, *block_parameters(*kept)}
        assert set(dict(root.named_parameters())) == set(cut.parameters)
        assert set(cut.stand_ins) == set(block_parameters(*({0, 1, 2, 3} - set(kept))))
        assert cut.outside == set(outside)
        assert cut.stages == [rank]


def test_names_are_the_whole_models_in_its_order_and_shared_ones_once():
    whole = [name for name, _ in Decoder().named_parameters()]
    cut = cut_of(Decoder(), rank=1)
    assert cut.names == whole
    assert cut.aliases == {"head.weight": "model.embed.weight"}
    assert cut.names_of("model.embed.weight") == ["model.embed.weight", "head.weight"]
    assert cut.block_stages == {name: {i // 2} for i in range(4) for name in block_parameters(i)}


@settings(max_examples=25)
@given(data=st.data(), pipeline=st.integers(1, 3), chunks=st.integers(1, 3))
def test_over_all_ranks_each_block_parameter_is_kept_once(data, pipeline, chunks):
    sizes = [data.draw(st.integers(1, 2)) for _ in range(pipeline * chunks)]
    names = [f"{i}" for i in range(sum(sizes))]
    kept = []
    for rank in range(pipeline):
        root = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in names))
        cut = cut_of(root, names, sizes, pipeline, rank)
        assert cut.stages == list(range(rank, pipeline * chunks, pipeline))
        assert [cut.stage_of_block(i) for i in range(len(names))] == [
            s for s, size in enumerate(sizes) for _ in range(size)
        ]
        kept += cut.parameters
    assert sorted(kept) == sorted(f"{name}.weight" for name in names)


def test_state_dict_of_a_hollow_model_has_what_is_here_and_all_buffers():
    root = Decoder()
    whole = copy.deepcopy(root).state_dict()
    cut_of(root, rank=1)
    state = root.state_dict()
    assert set(whole) - set(state) == set(block_parameters(0, 1))
    assert "model.blocks.0.1.running_mean" in state
    assert all(torch.equal(state[key], whole[key]) for key in state)


def test_gates_stand_on_blocks_and_on_the_largest_modules_outside_that_hold_something():
    cut = cut_of(Decoder(), rank=1)
    assert [(gate.name, gate.position, gate.owned) for gate in cut.gates] == [
        ("model.blocks.0", 0, False),
        ("model.blocks.1", 1, False),
        ("model.blocks.2", 2, True),
        ("model.blocks.3", 3, True),
        ("head", None, True),
        ("model.embed", None, True),
        ("model.norm", None, True),
    ]
    assert cut.ancestors == {"", "model", "model.blocks"}


def test_modules_outside_are_whole_subtrees_without_metrics_or_stateless_ones():
    root = Decoder()
    root.tower = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)))
    root.running = nn.BatchNorm1d(3, affine=False)
    root.metric = MeanMetric()
    names = outside_modules(root, ancestors_of(BLOCKS), set(BLOCKS))
    assert sorted(names) == ["head", "model.embed", "model.norm", "running", "tower"]


def test_ancestors_of_nested_and_top_level_blocks():
    assert ancestors_of(["encoder.block.0", "decoder.0"]) == {"", "encoder", "encoder.block", "decoder"}
    assert ancestors_of(["0", "1"]) == {""}
    assert ancestors_of([]) == set()


def test_releasing_a_shared_parameter_empties_all_modules_that_hold_it():
    root = Decoder()
    cut = cut_of(root, rank=0)
    parameter = cut.release("model.embed.weight")
    assert isinstance(parameter, nn.Parameter)
    assert set(cut.stand_ins) >= {"model.embed.weight", "head.weight"}
    assert root.head.weight.untyped_storage().nbytes() == 4
    assert "model.embed.weight" not in cut.parameters
    assert not {"model.embed.weight", "head.weight"} & set(dict(root.named_parameters()))


class Shared(nn.Module):
    """Encoder and decoder hold one embedding module, registered under a third name too."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(5, 3)
        for side in ("encoder", "decoder"):
            part = nn.Module()
            part.embed = self.shared
            part.block = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
            self.add_module(side, part)


SIDES = ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]


def test_a_shared_module_has_one_gate_and_is_released_once():
    root = Shared()
    cut = cut_of(root, SIDES)
    assert [gate.name for gate in cut.gates if gate.position is None] == ["shared"]
    assert set(cut.aliases) == {"encoder.embed.weight", "decoder.embed.weight"}
    cut.release("shared.weight")
    assert not isinstance(root.encoder.embed.weight, nn.Parameter)
    assert [name for name, _ in root.named_parameters()] == [
        "encoder.block.0.weight", "encoder.block.0.bias", "encoder.block.1.weight", "encoder.block.1.bias"
    ]  # fmt: skip


def tied_ends():
    net = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False))
    net[3].weight = net[0].weight
    return net


@pytest.mark.parametrize("rank", [0, 1])
def test_a_parameter_that_blocks_of_two_stages_share_stays_on_both(rank):
    root = tied_ends()
    cut = cut_of(root, ["0", "1", "2", "3"], rank=rank)
    assert cut.block_stages["0.weight"] == {0, 1}
    assert "0.weight" in cut.parameters
    assert cut.outside == set()
    assert cut.parameters["0.weight"] is root[3 * rank].weight
    assert not isinstance(root[3 * (1 - rank)].weight, nn.Parameter)


@pytest.mark.parametrize("rank", [0, 1])
def test_refresh_finds_parameters_that_were_replaced_also_under_a_second_name(rank):
    root = tied_ends()
    cut = cut_of(root, ["0", "1", "2", "3"], rank=rank)
    new = nn.Parameter(torch.zeros(5, 3))
    root[3 * rank].weight = new
    cut.refresh()
    assert cut.parameters["0.weight"] is new
    assert all(any(p is q for q in root.parameters()) for p in cut.parameters.values())


def test_a_parameter_shared_with_a_block_is_outside_too():
    root = Decoder()
    root.head.weight = root.model.blocks[3][0].weight  # registered in the block first
    cut = cut_of(root, rank=0)
    assert cut.aliases == {"head.weight": "model.blocks.3.0.weight"}
    assert "model.blocks.3.0.weight" in cut.outside
    assert cut.parameters["model.blocks.3.0.weight"] is root.head.weight
    cut.release("model.blocks.3.0.weight")
    assert not isinstance(root.head.weight, nn.Parameter)


def test_values_that_blocks_left_are_readable_for_the_stage_that_runs():
    cut = cut_of(Decoder(), sizes=(1, 1, 1, 1), rank=1)
    assert [cut.is_readable(stage) for stage in range(4)] == [False, True, False, True]

    class Active:
        stage = 3

    cut.keeper.active = Active()
    assert [cut.is_readable(stage) for stage in range(4)] == [False, False, False, True]


def test_a_pipeline_of_one_rank_holds_everything():
    root = Decoder()
    cut = cut_of(root, sizes=(4,), pipeline=1)
    assert list(cut.parameters) == cut.names
    assert cut.stand_ins == {}


def test_loose_buffers_are_those_in_no_gated_module():
    root = Decoder()
    root.model.register_buffer("scale", torch.ones(()))
    root.running = nn.BatchNorm1d(3, affine=False)
    assert [name for name, _ in cut_of(root).loose_buffers()] == ["step", "model.scale"]


def test_inside_whole_the_module_has_all_its_parameters_in_order():
    root, reference = Decoder(), Decoder()
    root.model.blocks[3][0].weight.requires_grad = False
    cut = cut_of(root, rank=0)
    for name in ("model.norm.bias", "model.embed.weight"):
        cut.release(name)
    before, stand_ins = dict(root.named_parameters()), dict(cut.stand_ins)
    with cut.whole():
        inside = dict(root.named_parameters())
        assert list(inside) == [name for name, _ in reference.named_parameters()]
        assert [p.shape for p in inside.values()] == [p.shape for p in reference.parameters()]
        assert all(inside[name] is parameter for name, parameter in before.items())
        assert [name for name, p in inside.items() if not p.requires_grad] == ["model.blocks.3.0.weight"]
        assert root.head.weight is root.model.embed.weight  # tied as ever
        optimizer = torch.optim.SGD(root.parameters(), 0.1)
        assert (
            sum(p.untyped_storage().nbytes() for p in inside.values() if not any(p is q for q in before.values())) < 100
        )
    assert dict(root.named_parameters()).keys() == before.keys()
    assert all(
        vars(root.get_submodule(name.rpartition(".")[0]))[name.rpartition(".")[2]] is stand_ins[name]
        for name in stand_ins
    )
    assert len(optimizer.param_groups[0]["params"]) == len(inside)


def test_whole_is_left_as_it_was_after_an_error():
    root = Decoder()
    cut = cut_of(root, rank=1)
    names = list(dict(root.named_parameters()))
    with pytest.raises(ZeroDivisionError), cut.whole():
        raise ZeroDivisionError
    assert list(dict(root.named_parameters())) == names
