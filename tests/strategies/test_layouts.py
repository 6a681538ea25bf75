import pytest
from torch import nn

from lightning_hybrid.parallel.mesh import Layout
from lightning_hybrid.strategies.layouts import Stages, choose_stages, stage_table


class EncoderDecoder(nn.Module):
    """Two lists, an embedding before the first, a wide layer between them and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 2)
        self.encoder = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
        self.between = nn.Linear(2, 6, bias=False)
        self.decoder = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
        self.head = nn.Linear(2, 4, bias=False)


BLOCKS = [f"{part}.{i}" for part in ("encoder", "decoder") for i in range(3)]


def stages(num_stages=2, partition="balanced", **options):
    return choose_stages({"partition": partition, **options}, EncoderDecoder(), BLOCKS, num_stages)


def test_what_stands_beside_a_block_counts_with_it():
    found = stages()
    assert found.costs == [4, 4, 4 + 12, 4, 4, 4 + 8]
    assert found.memory == [(100 + 4) * 4, 16, 16 * 4, 16, 16, 12 * 4]
    assert found.sizes == [3, 3]
    assert stages(3).sizes == [2, 2, 2]


def test_given_costs_take_the_place_of_numbers_of_parameters():
    found = stages(block_costs=[1, 1, 1, 1, 1, 5])
    assert (found.sizes, found.costs) == ([5, 1], [1, 1, 1, 1, 1, 5])
    assert stages(partition="uniform", block_costs=[1, 1, 1, 1, 1, 5]).sizes == [3, 3]


def test_a_memory_cap_moves_blocks_to_stages_that_have_room():
    costs = [1, 1, 1, 1, 1, 5]
    assert stages(block_costs=costs, max_stage_memory=416 + 16).sizes == [2, 4]


def test_a_memory_cap_that_nothing_keeps_to_is_refused_with_the_one_that_can_be_kept():
    with pytest.raises(ValueError, match=r"max_stage_memory=400: no .* 6 blocks into 2 stages .* Allow 416 or more"):
        stages(max_stage_memory=400)


@pytest.mark.parametrize("number", [5, 7])
def test_costs_for_another_number_of_blocks_are_refused(number):
    with pytest.raises(ValueError, match=rf"{number} numbers and the model 6 blocks, encoder.0 to decoder.2.*measure"):
        stages(block_costs=[1.0] * number)


def test_the_table_names_what_each_rank_does_and_how_far_from_ideal_that_is():
    table = stage_table(Stages([1, 2, 1, 2], [3, 1, 1, 1, 2, 2], [2**10] * 6), BLOCKS, Layout(2, 1), estimated=False)
    assert table.splitlines() == [
        "stage  rank  blocks                    cost  parameters",
        "    0     0  encoder.0                30.0%       1 KiB",
        "    1     1  encoder.1 to encoder.2   20.0%       2 KiB",
        "    2     0  decoder.0                10.0%       1 KiB",
        "    3     1  decoder.1 to decoder.2   40.0%       2 KiB",
        "slowest: stage 3, 1.60 times an equal share (costs as given in block_costs)",
    ]


def test_a_stage_that_several_ranks_hold_is_told_with_all_of_them():
    stages = Stages([3, 3], [1.0] * 6, [2**10] * 6)
    *_, first, second, _, note = stage_table(stages, BLOCKS, Layout(2, 2, 2), estimated=True).splitlines()
    assert first.split()[:2] == ["0", "0-3"]
    assert second.split()[:2] == ["1", "4-7"]
    assert note == "parameters are those of whole stages, before 2 ranks split them"


@pytest.mark.parametrize(
    ("size", "said"),
    [(1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**20, "3 MiB"), (5000 * 2**30, "5000 GiB")],
)
def test_sizes_are_readable(size, said):
    table = stage_table(Stages([1], [0.0], [size]), ["a"], Layout(1, 1), estimated=True)
    assert f" {said}\n" in table
    assert "0.00 times an equal share (costs estimated by numbers of parameters)" in table
