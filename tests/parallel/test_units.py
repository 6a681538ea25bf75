import pytest
import torch
from torch import nn

from lightning_hybrid.parallel.pipeline.cut import StageCut
from lightning_hybrid.parallel.zero.units import GROUP_BYTES, Unit, choose_units

BLOCKS = [f"blocks.{i}" for i in range(4)]


class Model(nn.Module):
    """One block without parameters, one that shares one of them, and modules of all sizes beside the blocks."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 9)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4)])
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.blocks[3].weight
        self.decoder = nn.ModuleDict({"embed": self.embed})  # the same module again, in what nobody calls
        self.wrapped = nn.Sequential(self.embed)  # and in what may be called


def names(units):
    return [name for unit in units for name in unit.names]


def test_blocks_with_parameters_of_their_own_are_units():
    model = Model()
    assert choose_units(model, None, BLOCKS, zero_stage=1) == []
    assert choose_units(model, None, BLOCKS, zero_stage=2) == [Unit(("blocks.0",), (0,)), Unit(("blocks.2",), (0,))]
    assert choose_units(model, None, [], zero_stage=3) == []
    assert names(choose_units(model, None, BLOCKS, zero_stage=2, excluded={"blocks.0"})) == ["blocks.2"]


def test_stage_3_has_units_of_large_modules_beside_the_blocks():
    beside = choose_units(Model(), None, BLOCKS, zero_stage=3)[2:]
    assert beside == [Unit(("embed",), (0,), is_block=False), Unit(("head",), (0,), is_block=False)]
    others = choose_units(Model(), None, BLOCKS, zero_stage=3, excluded={"embed", "head"})[2:]
    assert names(others) == ["wrapped"]  # if it is what the model calls


def test_what_holds_a_module_that_blocks_share_is_no_unit():
    model = Model()
    model.blocks[0], model.blocks[2] = (nn.Sequential(nn.Linear(4, 4), model.norm) for _ in range(2))
    assert choose_units(model, None, BLOCKS, zero_stage=2) == []
    model.blocks[0], model.blocks[2] = nn.Sequential(nn.Linear(4, 4), model.norm), nn.Linear(4, 4)
    assert names(choose_units(model, None, BLOCKS, zero_stage=2)) == ["blocks.2"], "it is beside the blocks too"


@pytest.mark.parametrize("rank", [0, 1])
def test_each_stage_has_its_own(rank):
    model = Model()
    cut = StageCut(model, BLOCKS, [1, 1, 1, 1], pipeline=2, rank=rank, device=torch.device("cpu"))
    assert names(choose_units(model, cut, BLOCKS, zero_stage=1)) == [["blocks.0", "blocks.2"], []][rank]
    units = choose_units(model, cut, BLOCKS, zero_stage=3, callers={"embed": [0, 2], "head": [3]})
    if rank == 0:
        assert units[-1] == Unit(("embed",), (0, 2), is_block=False)
        assert "head" not in names(units)
    else:
        assert units == []  # without blocks there is nothing to be smaller than


def together(sizes, **options):
    """Numbers of blocks in units."""
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(1, number, bias=False) for number in sizes)
    names = [f"blocks.{i}" for i in range(len(sizes))]
    found = choose_units(model, None, names, zero_stage=2, **options)
    assert [name for unit in found for name in unit.names] == names
    return [len(unit.names) for unit in found]


def test_small_neighbours_are_one_unit():
    assert together([1] * 7) == [1] * 7, "a unit has at most a quarter of a stage"
    assert together([1] * 8) == [2] * 4
    assert together([1] * 15) == [3] * 5
    assert together([1] * 16, group=False) == [1] * 16
    assert together([9, 1, 1, 1, 20, 1, 1, 1, 1]) == [1, 3, 1, 4], "large ones part them"


def test_no_unit_of_several_blocks_is_larger_than_a_message_should_be():
    quarter = GROUP_BYTES // 16  # numbers of 4 bytes
    assert together([quarter] * 32) == [4] * 8
    assert together([quarter + 1] * 32) == [3] * 10 + [2]
    assert together([4 * quarter, 1] * 8) == [1] * 16


def test_units_end_with_their_stage():
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(1, 1) for _ in range(32))
    names = [f"blocks.{i}" for i in range(32)]
    cut = StageCut(model, names, [8] * 4, pipeline=2, rank=1, device=torch.device("cpu"))
    found = choose_units(model, cut, names, zero_stage=2)
    assert [unit.stages for unit in found] == [(1,)] * 4 + [(3,)] * 4
    assert [unit.names[0] for unit in found] == [f"blocks.{i}" for i in (8, 10, 12, 14, 24, 26, 28, 30)]
