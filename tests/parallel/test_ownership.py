import pytest
import torch
from torch import nn

from lightning_hybrid.parallel.mesh import Layout, Mesh
from lightning_hybrid.parallel.pipeline.cut import StageCut
from lightning_hybrid.parallel.pipeline.ownership import settle
from lightning_hybrid.parallel.pipeline.plan import Needs
from tests.launch import run_ranks

CPU = torch.device("cpu")


class Model(nn.Module):
    """Tied embedding and head, a module in the middle, one that nobody reads, and four blocks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.blocks = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(4))
        self.middle = nn.Linear(2, 2, bias=False)
        self.unread = nn.Linear(2, 2, bias=False)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight


def cut_on(mesh, root, sizes=(2, 2)):
    blocks = [f"blocks.{i}" for i in range(4)]
    return StageCut(root, blocks, sizes, pipeline=mesh.layout.pipeline, rank=mesh.pipeline_rank, device=CPU)


def settled():
    mesh = Mesh(Layout(2, 2), device=CPU)
    root = Model()
    cut = cut_on(mesh, root)
    needs = [
        Needs({"embed.weight"}, {"embed"}, {"a"}),
        Needs({"embed.weight", "middle.weight"}, {"middle", "embed"}, {"a"}),
    ]
    ownership = settle(cut, mesh, {mesh.pipeline_rank: needs[mesh.pipeline_rank]})
    for parameter in root.parameters():
        parameter.grad = torch.full_like(parameter, 10.0**mesh.rank)
    root.unread.weight.grad = None
    ownership.sum_shared_gradients(cut)
    return {
        "holders": ownership.holders,
        "owners": [
            ownership.owner(name) for name in ("embed.weight", "middle.weight", "blocks.3.weight", "unread.weight")
        ],
        "kept": list(cut.parameters),
        "released": len(ownership.released),
        "gates": {gate.name: gate.owned for gate in cut.gates},
        "groups": sorted(ownership.groups),
        "writers": ownership.writers,
        "gradients": {name: None if p.grad is None else p.grad.unique().tolist() for name, p in cut.parameters.items()},
    }


@pytest.fixture(scope="module")
def results():
    return run_ranks(4, settled)


def test_all_ranks_agree_on_holders_and_owners(results):
    for result in results:
        assert result["holders"] == {
            "embed.weight": (0, 1),
            "blocks.0.weight": (0,),
            "blocks.1.weight": (0,),
            "blocks.2.weight": (1,),
            "blocks.3.weight": (1,),
            "middle.weight": (1,),
            "unread.weight": (0, 1),  # no stage has read it so far
        }
        assert result["owners"] == [0, 1, 1, 0]
        assert result["writers"] == {"embed": 0, "middle": 1, "a": 1}


def test_each_rank_keeps_what_its_stages_read_and_closes_the_gates_of_the_rest(results):
    for rank, result in enumerate(results):
        first = rank < 2
        assert result["kept"] == [
            "embed.weight",
            *(
                ["blocks.0.weight", "blocks.1.weight"]
                if first
                else ["blocks.2.weight", "blocks.3.weight", "middle.weight"]
            ),
            "unread.weight",
        ]
        assert result["released"] == (1 if first else 0)
        closed = [name for name, owned in result["gates"].items() if not owned]
        assert closed == (["blocks.2", "blocks.3", "middle"] if first else ["blocks.0", "blocks.1"])


def test_gradients_of_shared_parameters_are_summed_over_their_holders_in_each_replica(results):
    for rank, result in enumerate(results):
        replica = [1 + 100, 10 + 1000][rank % 2]
        assert result["groups"] == [(0, 1)]
        assert result["gradients"]["embed.weight"] == [replica]
        assert result["gradients"]["unread.weight"] is None
        own = "blocks.0.weight" if rank < 2 else "middle.weight"
        assert result["gradients"][own] == [10**rank]


def three_holders():
    """Rank 1 of three holds a block in between, and reads nothing outside."""
    mesh = Mesh(Layout(3, 1), device=CPU)
    root = Model()
    root.blocks[3].weight = root.blocks[0].weight
    cut = cut_on(mesh, root, (1, 2, 1))
    needs = {0: {"embed.weight"}, 1: set(), 2: {"embed.weight", "middle.weight", "unread.weight"}}
    ownership = settle(cut, mesh, {mesh.rank: Needs(needs[mesh.rank])})
    for parameter in cut.parameters.values():
        parameter.grad = torch.full_like(parameter, 10.0**mesh.rank)
    ownership.sum_shared_gradients(cut)
    return {name: p.grad.unique().tolist() for name, p in cut.parameters.items()}, len(ownership.groups)


def test_a_rank_between_the_holders_has_no_part_in_their_group():
    (first, groups0), (second, groups1), (third, groups2) = run_ranks(3, three_holders)
    assert first == {"embed.weight": [101], "blocks.0.weight": [101]}
    assert second == {"blocks.1.weight": [10], "blocks.2.weight": [10]}
    assert third == {"embed.weight": [101], "blocks.0.weight": [101], "middle.weight": [100], "unread.weight": [100]}
    assert (groups0, groups1, groups2) == (1, 0, 1)


class SharedModule(nn.Module):
    """The parameter's first name is not the name of the gate."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.embed = nn.Embedding(4, 2)
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        self.shared = self.encoder.embed


def shared_module():
    mesh = Mesh(Layout(2, 1), device=CPU)
    root = SharedModule()
    settle(cut_on(mesh, root), mesh, {mesh.rank: Needs({"encoder.embed.weight"} if mesh.rank == 0 else set())})
    try:
        return root.shared(torch.tensor([1])).shape
    except RuntimeError as error:
        return str(error)


def test_the_gate_of_a_shared_module_closes_whatever_name_its_parameter_has():
    first, second = run_ranks(2, shared_module)
    assert first == (1, 2)
    assert "was called outside a step" in second
