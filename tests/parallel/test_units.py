import pytest
import torch
from torch import nn

from lightning_hybrid.parallel.pipeline.cut import StageCut
from lightning_hybrid.parallel.zero.units import Unit, choose_units

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
    return [unit.name for unit in units]


def test_blocks_with_parameters_of_their_own_are_units():
    model = Model()
    assert choose_units(model, None, BLOCKS, zero_stage=1) == []
    assert choose_units(model, None, BLOCKS, zero_stage=2) == [Unit("blocks.0", (0,)), Unit("blocks.2", (0,))]
    assert choose_units(model, None, [], zero_stage=3) == []
    assert names(choose_units(model, None, BLOCKS, zero_stage=2, excluded={"blocks.0"})) == ["blocks.2"]


def test_stage_3_has_units_of_large_modules_beside_the_blocks():
    beside = choose_units(Model(), None, BLOCKS, zero_stage=3)[2:]
    assert beside == [Unit("embed", (0,), is_block=False), Unit("head", (0,), is_block=False)]
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
        assert units[-1] == Unit("embed", (0, 2), is_block=False)
        assert "head" not in names(units)
    else:
        assert units == []  # without blocks there is nothing to be smaller than
