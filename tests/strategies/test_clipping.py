import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_hybrid.parallel.gradients import local
from lightning_hybrid.strategies.clipping import Clipping, NormWatch
from tests.launch import run_ranks

CPU = torch.device("cpu")


def parameter(*gradient):
    result = nn.Parameter(torch.zeros(len(gradient), dtype=torch.float64))
    result.grad = torch.tensor(gradient, dtype=torch.float64)
    return result


def clipping_of(counted):
    engine = SimpleNamespace(counted_parameters=lambda: counted, mesh=SimpleNamespace(device=CPU))
    return Clipping(engine, Precision())


def over_two_ranks():
    """Rank 0 has a parameter of its own, both share one that rank 0 counts, and each has half of a sharded one."""
    rank = dist.get_rank()
    own, shared = parameter(3.0, 4.0) if rank == 0 else parameter(12.0), parameter(0.0, 84.0)
    sharded = nn.Parameter(distribute_tensor(torch.zeros(2, 1), init_device_mesh("cpu", (2,)), [Shard(0)]))
    sharded.grad = distribute_tensor(torch.tensor([[132.0], [0.0]]), sharded.device_mesh, [Shard(0)])
    other = parameter(1000.0)  # not in the optimizer, so neither counted nor scaled
    without = nn.Parameter(torch.zeros(1))
    clipping = clipping_of([own, sharded, other, without, *([shared] if rank == 0 else [])])
    optimizer = torch.optim.SGD([{"params": [own, shared]}, {"params": [sharded, without]}], 0.1)
    norm = clipping.norm(optimizer)  # 5, 12, 84, 132: sides of right triangles
    clipping.by_norm(optimizer, 314)
    untouched = own.grad.tolist()
    clipping.by_norm(optimizer, 15.7)
    scaled = [local(p.grad).reshape(-1).tolist() for p in (own, shared, sharded, other)]
    clipping.by_value(optimizer, 0.5)
    return (
        norm.item(),
        untouched,
        scaled,
        [local(p.grad).reshape(-1).tolist() for p in (own, shared, sharded, other)],
        without.grad,
    )


def test_the_norm_of_the_whole_model_decides_and_all_gradients_are_scaled_alike():
    (norm, untouched, scaled, clamped, without), (other_norm, other_untouched, other_scaled, other_clamped, _) = (
        run_ranks(2, over_two_ranks)
    )
    assert norm == other_norm == pytest.approx(157)
    assert (untouched, other_untouched) == ([3, 4], [12])
    expected = [[0.3, 0.4], [0, 8.4], [13.2], [1000]], [[1.2], [0, 8.4], [0], [1000]]
    for found, right in zip((scaled, other_scaled), expected, strict=True):
        assert [pytest.approx(values, rel=1e-6) for values in right] == found
    assert clamped == [pytest.approx([0.3, 0.4], rel=1e-6), [0, 0.5], [0.5], [1000]]
    assert other_clamped == [[0.5], [0, 0.5], [0], [1000]]
    assert without is None


def one_rank():
    results = {}
    for name, gradient in {
        "usual": [3.0, -4.0],
        "zero": [0.0, 0.0],
        "nan": [1.0, float("nan")],
        "infinite": [1.0, float("inf")],
    }.items():
        for limit in (2.5, 1e9):
            p, q = parameter(*gradient), parameter(*gradient)
            clipping_of([p]).by_norm(torch.optim.SGD([p], 0.1), limit)
            torch.nn.utils.clip_grad_norm_([q], limit)
            results[name, limit] = p.grad.tolist(), q.grad.tolist()
    p = parameter(3.0, -4.0)
    for limit in (0, -1, 0.0):
        clipping_of([p]).by_norm(torch.optim.SGD([p], 0.1), limit)
        clipping_of([p]).by_value(torch.optim.SGD([p], 0.1), limit)
    return results, p.grad.tolist()


def test_one_process_clips_as_torch_does_and_no_limit_means_no_clipping():
    ((results, unlimited),) = run_ranks(1, one_rank)
    for (name, limit), (ours, torchs) in results.items():
        assert ours == pytest.approx(torchs, rel=1e-12, nan_ok=True), (name, limit)
    assert unlimited == [3, -4]


def test_the_precision_plugin_gets_its_own_clipping_back():
    precision = Precision()
    own = precision.clip_grad_by_norm, precision.clip_grad_by_value
    clipping = Clipping(SimpleNamespace(), precision)
    assert (precision.clip_grad_by_norm, precision.clip_grad_by_value) == (clipping.by_norm, clipping.by_value)
    clipping.remove()
    clipping.remove()
    assert (precision.clip_grad_by_norm, precision.clip_grad_by_value) == own


TAKEN = {
    "norm": lambda g: g.norm(2),
    "vector_norm": lambda g: torch.linalg.vector_norm(g),
    "get_total_norm": lambda g: torch.nn.utils.get_total_norm([g]),
    "linalg.norm": lambda g: torch.linalg.norm(g),
}


def watched():
    """For each way to take a norm by hand inside a hook: what it gives, and how many warnings, in two goes."""
    results = {}
    for name, take in TAKEN.items():
        watch, own = NormWatch(), parameter(3.0, 4.0)
        engine = SimpleNamespace(counted_parameters=lambda own=own: [own], mesh=SimpleNamespace(device=CPU))
        clipping = Clipping(engine, Precision(), watch)
        watch.hook = "on_before_optimizer_step"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with watch:
                clipping.by_norm(torch.optim.SGD([own], 0.1), 2.5)
                own.grad.mul_(1.0)
            silent = len(caught)
            with watch:
                found = take(own.grad).item()
            with watch:
                take(own.grad)
        results[name] = silent, found, [str(warning.message) for warning in caught]
    return results


def test_a_norm_that_a_hook_takes_by_hand_is_warned_of_once_and_ours_is_not():
    (results,) = run_ranks(1, watched)
    assert list(results) == list(TAKEN)
    for silent, found, (message,) in results.values():
        assert silent == 0
        assert found == pytest.approx(2.5, rel=1e-6)
        assert message.startswith("on_before_optimizer_step takes a norm.")
