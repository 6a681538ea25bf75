import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.parallel.mesh import Layout, Mesh
from tests.launch import run_ranks

CPU = torch.device("cpu")
SIZES = st.integers(1, 6)


@given(pipeline=SIZES, data=SIZES, tensor=SIZES)
def test_coordinates_are_the_inverse_of_ranks(pipeline, data, tensor):
    layout = Layout(pipeline, data, tensor)
    ranks = [layout.rank(p, d, t) for p in range(pipeline) for d in range(data) for t in range(tensor)]
    assert ranks == list(range(layout.world_size))
    assert [layout.rank(*layout.coordinates(rank)) for rank in ranks] == ranks


def test_the_tensor_axis_is_fastest_and_the_pipeline_axis_slowest():
    layout = Layout(pipeline=2, data=3, tensor=2)
    assert [layout.coordinates(rank) for rank in (0, 1, 2, 6, 11)] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (1, 0, 0),
        (1, 2, 1),
    ]


@given(pipeline=SIZES, data=SIZES, tensor=SIZES)
def test_a_world_that_fits_is_filled(pipeline, data, tensor):
    layout = Layout.of_world(pipeline * data * tensor, pipeline=pipeline, tensor=tensor)
    assert layout == Layout(pipeline, data, tensor)


def test_copies_of_shards_divide_the_data_axis():
    layout = Layout.of_world(24, pipeline=2, tensor=2, replicate=3)
    assert (layout.data, layout.replicate, layout.shard, layout.replica) == (6, 3, 2, 4)
    with pytest.raises(
        ValueError, match=r"replicate_size=4 does not divide the data axis: 12 processes are 6 replicas"
    ):
        Layout.of_world(12, pipeline=2, replicate=4)


def copies():
    mesh = Mesh(Layout(1, 4, replicate=2), device=CPU)
    device_mesh = mesh.dense.device_mesh()
    groups = [device_mesh.get_group("shard"), device_mesh.get_group("replicate"), mesh.data_group]
    return [mesh.dense.copy, *(sum_over(group) for group in groups)]


def test_shards_of_one_copy_are_next_to_each_other():
    first, second = (11, 1100), (101, 1010)
    assert run_ranks(4, copies) == [[i // 2, first[i // 2], second[i % 2], 1111] for i in range(4)]


@pytest.mark.parametrize(
    ("world_size", "pipeline", "tensor", "advice"),
    [(3, 2, 1, "Start 2 processes"), (1, 4, 1, "Start 4 processes"), (7, 2, 3, "Start 6 processes")],
)
def test_a_world_that_does_not_fit_is_refused_with_a_size_that_does(world_size, pipeline, tensor, advice):
    with pytest.raises(ValueError, match=rf"world_size={world_size} is not a multiple.*{advice}"):
        Layout.of_world(world_size, pipeline=pipeline, tensor=tensor)


def sum_over(group):
    total = torch.tensor(10 ** dist.get_rank())
    dist.all_reduce(total, group=group)
    return total.item()


def four_ranks():
    meshes = [Mesh(Layout(2, 2), device=CPU), Mesh(Layout(1, 4), device=CPU), Mesh(Layout(4, 1), device=CPU)]
    square = meshes[0]
    apart = square.group([[0], [1, 3], [2]])
    with pytest.raises(ValueError, match="needs 2 processes, there are 4"):
        Mesh(Layout(2, 1), device=CPU)
    return {
        "sums": [(sum_over(mesh.pipeline_group), sum_over(mesh.data_group)) for mesh in meshes],
        "ranks": [(mesh.pipeline_ranks, mesh.data_ranks) for mesh in meshes],
        "coordinates": (square.pipeline_rank, square.data_rank, square.tensor_rank),
        "channels": [list(mesh.channels) for mesh in meshes],
        "groups": len({id(group) for group in [square.pipeline_group, square.data_group, *square.channels.values()]}),
        "channel sums": {sum_over(group) for group in square.channels.values()},
        "stages": [square.rank_of_stage(stage) for stage in range(4)],
        "apart": sum_over(apart),
        "names": [
            group.group_desc
            for group in (square.pipeline_group, square.data_group, square.tensor_group, *square.channels.values())
        ],
    }


@pytest.fixture(scope="module")
def results():
    return run_ranks(4, four_ranks)


def test_each_group_holds_the_ranks_of_its_axis(results):
    assert [result["coordinates"] for result in results] == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    assert [result["sums"] for result in results] == [
        [(101, 11), (1, 1111), (1111, 1)],
        [(1010, 11), (10, 1111), (1111, 10)],
        [(101, 1100), (100, 1111), (1111, 100)],
        [(1010, 1100), (1000, 1111), (1111, 1000)],
    ]
    assert [result["ranks"][0] for result in results] == [
        ([0, 2], [0, 1]), ([1, 3], [0, 1]), ([0, 2], [2, 3]), ([1, 3], [2, 3])
    ]  # fmt: skip
    assert [result["apart"] for result in results] == [1, 1010, 100, 1010]


def with_a_tensor_axis():
    meshes = [Mesh(Layout(2, 1, 2), device=CPU), Mesh(Layout(1, 2, 2), device=CPU), Mesh(Layout(1, 1, 4), device=CPU)]
    groups = [(mesh.pipeline_group, mesh.data_group, mesh.tensor_group) for mesh in meshes]
    return {
        "sums": [tuple(sum_over(group) for group in of_mesh) for of_mesh in groups],
        "ranks": [(mesh.pipeline_ranks, mesh.data_ranks, mesh.tensor_ranks) for mesh in meshes],
        "place": [mesh.tensor_group.rank() == mesh.tensor_rank for mesh in meshes],
        "neighbours": meshes[0].rank_of_stage(1),
    }


def test_ranks_of_a_tensor_group_differ_in_the_tensor_coordinate_only():
    results = run_ranks(4, with_a_tensor_axis)
    first, *_, last = results
    assert first["ranks"] == [([0, 2], [0], [0, 1]), ([0], [0, 2], [0, 1]), ([0], [0], [0, 1, 2, 3])]
    assert last["ranks"] == [([1, 3], [3], [2, 3]), ([3], [1, 3], [2, 3]), ([3], [3], [0, 1, 2, 3])]
    for result in results:
        assert result["sums"] == [tuple(sum(10**rank for rank in ranks) for ranks in of) for of in result["ranks"]]
        assert result["place"] == [True] * 3
    assert [result["neighbours"] for result in results] == [2, 3, 2, 3]
    assert Layout(2, 3, 4).replica == 8


def test_groups_are_named_by_axis_and_direction_for_those_who_count_traffic(results):
    channels = ["pipeline forward", "pipeline backward"] * 2
    assert [result["names"] for result in results] == [["pipeline", "data", "tensor", *channels]] * 4


def test_each_direction_over_each_boundary_has_a_communicator_and_replicas_alone_have_none(results):
    for rank, result in enumerate(results):
        square, alone, line = result["channels"]
        assert square == [(True, 0), (False, 0), (True, 1), (False, 1)]  # two ranks: straight, and wrapped around
        assert alone == []
        assert set(line) == {(forward, lower) for forward in (True, False) for lower in (rank, (rank - 1) % 4)}
        assert result["groups"] == 6
        assert len(result["channel sums"]) == 1
    assert [result["stages"] for result in results] == [[0, 2, 0, 2], [1, 3, 1, 3]] * 2
