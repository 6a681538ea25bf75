import math
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_hybrid.parallel import gradients
from lightning_hybrid.parallel.gradients import (
    gradient_norm,
    install_gradients,
    local,
    scale_gradients,
    sum_gradients,
    take_gradients,
)
from tests.launch import run_ranks

CPU = torch.device("cpu")


def parameter(shape, gradient=None, dtype=torch.float64):
    """A parameter, whose gradient is filled with a number or absent."""
    result = nn.Parameter(torch.zeros(shape, dtype=dtype))
    if gradient is not None:
        result.grad = torch.full(shape, float(gradient), dtype=dtype)
    return result


def test_gradients_are_taken_away_and_put_back():
    first, second, without = parameter((2,), 3), parameter((), 4), parameter((1,))
    taken = take_gradients([first, without, second])
    assert [p.grad for p in (first, second, without)] == [None] * 3
    install_gradients(taken)
    assert (first.grad.tolist(), second.grad.item(), without.grad) == ([3, 3], 4, None)


def test_gradients_are_put_on_top_of_what_is_there():
    p = parameter((2,), 3)
    taken = take_gradients([p])
    p.grad = torch.ones(2, dtype=torch.float64)
    install_gradients(taken)
    assert p.grad.tolist() == [4, 4]
    assert take_gradients([]) == []


@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5, dtype=torch.float64)])
def test_scaling_keeps_the_type_and_leaves_parameters_alone(factor):
    p, q, without = parameter((2,), 4, torch.bfloat16), parameter((1,), 2), parameter((1,))
    scale_gradients([p, q, without], factor)
    assert (p.grad.tolist(), p.grad.dtype, q.grad.item(), without.grad) == ([2, 2], torch.bfloat16, 1, None)
    assert p.tolist() == [0, 0]


def mixed_parameters(rank):
    """Odd shapes, three types, and gradients that some rank, or both, do not have."""
    return [
        parameter((3, 2), rank + 1),
        parameter((), rank + 1, torch.float32),
        parameter((5,), None if rank else 7),
        parameter((2,), None),
        parameter((0, 4), rank),
        parameter((1, 1, 3), rank + 1, torch.bfloat16),
        parameter((2,), None, torch.float32),
        parameter((4,), 10 ** (rank + 1), torch.float32),
        parameter((1,), 5 if rank else None, torch.bfloat16),
    ]


def summed(bucket_bytes):
    parameters = mixed_parameters(dist.get_rank())
    sizes, reduce = [], dist.all_reduce

    def counting(tensor, *args, **kwargs):
        sizes.append(tensor.numel() * tensor.element_size())
        return reduce(tensor, *args, **kwargs)

    with patch.object(gradients, "BUCKET_BYTES", bucket_bytes), patch.object(dist, "all_reduce", counting):
        sum_gradients(parameters, dist.group.WORLD)
    return [
        None if p.grad is None else (p.grad.dtype == p.dtype, p.grad.shape == p.shape, p.grad.reshape(-1).tolist())
        for p in parameters
    ], sizes[1:]


def others():
    """Cases with a state of their own, in one launch."""
    rank = dist.get_rank()
    strided = parameter((2, 3))
    strided.grad = (torch.arange(6.0, dtype=torch.float64).view(3, 2) * (rank + 1)).t()
    kept = strided.grad
    sum_gradients([strided], dist.group.WORLD)
    alone = [dist.new_group([r]) for r in range(2)][rank]
    single = parameter((2,), rank + 1)
    sum_gradients([single], alone)
    sum_gradients([], dist.group.WORLD)
    mesh = init_device_mesh("cpu", (2,))
    sharded = nn.Parameter(distribute_tensor(torch.zeros(3, 2, dtype=torch.float64), mesh, [Shard(0)]))
    sharded.grad = distribute_tensor(torch.arange(6.0, dtype=torch.float64).view(3, 2), mesh, [Shard(0)])
    missing = nn.Parameter(distribute_tensor(torch.zeros(3, 2, dtype=torch.float64), mesh, [Shard(0)]))
    if rank == 1:
        missing.grad = distribute_tensor(torch.ones(3, 2, dtype=torch.float64), mesh, [Shard(0)], src_data_rank=None)
    sum_gradients([sharded, missing], alone)
    scale_gradients([sharded], 2.0)
    return {
        "strided": (strided.grad.tolist(), strided.grad is kept),
        "alone": single.grad.tolist(),
        "sharded": (isinstance(sharded.grad, DTensor), local(sharded.grad).tolist()),
    }


@pytest.mark.parametrize(("bucket_bytes", "messages"), [(2**20, 3), (24, 6), (1, 9)])
def test_gradients_are_summed_over_the_ranks_in_buckets_of_one_type(bucket_bytes, messages):
    (first, sizes), (second, _) = run_ranks(2, summed, bucket_bytes)
    assert first == second
    assert [None if found is None else found[2] for found in first] == [
        [3] * 6, [3], [7] * 5, None, [], [3] * 3, None, [110] * 4, [5]
    ]  # fmt: skip
    assert all(same_type and same_shape for same_type, same_shape, _ in filter(None, first))
    assert len(sizes) == messages
    assert sum(sizes) == 8 * (6 + 5 + 2) + 4 * (1 + 2 + 4) + 2 * (3 + 1)  # each gradient travels once


def test_strided_gradients_groups_of_one_and_shards():
    first, second = run_ranks(2, others)
    assert first["strided"] == second["strided"] == ([[0, 6, 12], [3, 9, 15]], True)
    assert (first["alone"], second["alone"]) == ([1, 1], [2, 2])
    assert first["sharded"] == (True, [[0, 2], [4, 6]])
    assert second["sharded"] == (True, [[8, 10]])


def norms():
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))

    def sharded(tensor):
        result = nn.Parameter(distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(0)]))
        result.grad = distribute_tensor(tensor, mesh, [Shard(0)])
        return result

    cases = {
        "owned": [parameter((1,), 3 + rank)],  # 3 on rank 0, 4 on rank 1
        "replicated": [parameter((4,), 2)] if rank == 0 else [],
        "missing": [parameter((2,))],
        "mixed": [parameter((2,), 1, torch.float32), parameter((3, 0), 1), parameter((), 2, torch.bfloat16)],
        "sharded": [sharded(torch.tensor([[1.0, -2.0], [2.0, 4.0], [-4.0, 8.0]]))],
        "empty shard": [sharded(torch.tensor([[-3.0, 4.0]]))],
        "small": [parameter((1000,), 1, torch.bfloat16)],  # summed in bfloat16, 256 + 1 is 256
        "nan": [parameter((2,), math.nan if rank else 1)],
        "infinite": [parameter((2,), 1), parameter((), math.inf if rank else 1)],
    }
    found = {}
    for name, parameters in cases.items():
        for order in (1.0, 2.0, 3.0, math.inf):
            norm = gradient_norm(parameters, norm_type=order, device=CPU)
            assert (norm.dtype, norm.shape) == (torch.float64, ())
            found[name, order] = norm.item()
    return found


NORMS = {
    ("owned", 1): 7, ("owned", 2): 5, ("owned", 3): 91 ** (1 / 3), ("owned", math.inf): 4,
    ("replicated", 1): 8, ("replicated", 2): 4, ("replicated", math.inf): 2,
    ("missing", 1): 0, ("missing", 2): 0, ("missing", math.inf): 0,
    ("mixed", 1): 8, ("mixed", 2): 12 ** 0.5, ("mixed", math.inf): 2,
    ("sharded", 1): 21, ("sharded", 2): 105 ** 0.5, ("sharded", math.inf): 8,
    ("empty shard", 1): 7, ("empty shard", 2): 5, ("empty shard", math.inf): 4,
    ("small", 1): 2000, ("small", 2): 2000 ** 0.5, ("small", math.inf): 1,
    ("nan", 1): math.nan, ("nan", 2): math.nan, ("nan", math.inf): math.nan,
    ("infinite", 1): math.inf, ("infinite", 2): math.inf, ("infinite", math.inf): math.inf,
}  # fmt: skip


def test_the_norm_is_that_of_all_gradients_together_and_equal_on_all_ranks():
    first, second = run_ranks(2, norms)
    assert first.keys() == second.keys()
    for case, expected in NORMS.items():
        assert first[case] == pytest.approx(expected, rel=1e-6, nan_ok=True), case
        assert second[case] == pytest.approx(first[case], rel=0, nan_ok=True), case


def low_precision():
    """Sums of 256 and two ones, which some order of adding in bfloat16 loses."""
    found = []
    for at_least in (None, torch.float32):
        p, wide = parameter((3,), 1.0, torch.bfloat16), parameter((1,), 0.1)
        p.grad[dist.get_rank()] = 256.0
        sum_gradients([p, wide], dist.group.WORLD, at_least=at_least)
        found.append((p.grad.dtype, p.grad.tolist(), wide.grad.dtype))
    return found


def test_gradients_of_low_precision_are_summed_in_a_higher_one_and_rounded_once_where_that_is_asked_for():
    for plain, precise in run_ranks(3, low_precision):
        assert plain[1] != [258] * 3
        assert precise == (torch.bfloat16, [258] * 3, torch.float64)
