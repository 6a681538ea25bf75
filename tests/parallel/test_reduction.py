from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.parallel import gradients, reduction
from lightning_hybrid.parallel.data_parallel import Replicated
from lightning_hybrid.parallel.mesh import Layout, Mesh
from lightning_hybrid.parallel.pipeline.cut import StageCut
from lightning_hybrid.parallel.reduction import Reduction
from tests.launch import run_ranks

CPU = torch.device("cpu")


class Messages:
    """Context with buckets of one parameter each that notes the sizes of all-reduces that have begun."""

    def __enter__(self):
        self.sizes, reduce = [], dist.all_reduce

        def noting(tensor, *args, **kwargs):
            self.sizes.append(tensor.numel())
            return reduce(tensor, *args, **kwargs)

        self.patches = [
            patch.object(dist, "all_reduce", noting),
            patch.object(gradients, "BUCKET_BYTES", 1),
            patch.object(reduction, "FIRST_BUCKET_BYTES", 1),
        ]
        for each in self.patches:
            each.__enter__()
        return self

    def __exit__(self, *error):
        for each in self.patches:
            each.__exit__(*error)


def numbered(*sizes):
    """Parameters whose values are those of the one before and one more."""
    return [nn.Parameter(torch.full((size,), 1.0 + i, dtype=torch.float64)) for i, size in enumerate(sizes)]


def of_graphs_that_differ():
    """Ranks use parameters in opposite order, one of them only on rank 1, one on none, one in an earlier batch."""
    rank = dist.get_rank()
    a, b, only, _, earlier = parameters = numbered(2, 3, 4, 5, 6)
    earlier.grad = torch.full_like(earlier, rank + 1.0)
    with Messages() as messages:
        sums = Reduction(parameters, dist.group.WORLD)
        sums.watch(parameters)
        first, second = (b, a) if rank else (a, b)
        loss = (second.sum() * 2).sin() + first.sum() + (only.sum() if rank else 0)
        loss.backward()
        within = list(messages.sizes)
        sums.finish()
    return within, messages.sizes, [None if p.grad is None else p.grad.tolist() for p in parameters]


def test_messages_have_one_order_and_each_gradient_is_the_sum_of_those_there_are():
    (first, all_first, sums), (second, all_second, others) = run_ranks(2, of_graphs_that_differ)
    assert (first, second) == ([2, 3], [2, 3, 4])  # inside the backward pass, up to the first that does not come
    assert all_first == all_second == [2, 3, 4, 5, 6, 10]  # and at the end two flags for each
    assert sums == others
    twice = [1 + 2 * torch.tensor(x).double().cos().item() for x in (2 * 1.0 * 2, 2 * 2.0 * 3)]
    assert_close(torch.tensor(sums[0][:1] + sums[1][:1]), torch.tensor(twice))
    assert sums[2:] == [[1] * 4, None, [3] * 6]


def of_other_cases():
    found, world = {}, dist.group.WORLD
    # a reentrant checkpoint adds to a gradient twice in one backward pass
    (shared,) = numbered(2)
    sums = Reduction([shared], world)
    sums.watch([shared])
    x = torch.full((2,), 1.0 + dist.get_rank(), dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        x = checkpoint(lambda y: y * shared, x, use_reentrant=True)
    (x.sum() + (shared * shared).sum()).backward()
    sums.finish()
    found["late"] = shared.grad.tolist()
    # gradients are laid out as their parameters, and none of them keeps more than its bucket
    image = nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    other = nn.Parameter(torch.zeros(6))
    sums = Reduction([image, other], world)
    image.grad = torch.arange(120.0).view(2, 3, 4, 5)
    sums.finish()
    found["strides"] = (
        image.grad.stride() == image.stride(),
        torch.equal(image.grad, 2 * torch.arange(120.0).view(2, 3, 4, 5)),
    )
    found["none"] = other.grad
    # a window that was broken off leaves nothing behind
    (p,) = numbered(1)
    sums = Reduction([p], world)
    sums.watch([p])
    sums.reset()
    p.sum().backward()
    found["unwatched"] = p.grad.tolist()
    return found


def test_late_gradients_layouts_and_broken_windows():
    for found in run_ranks(2, of_other_cases):
        assert found["late"] == [2 * 1 + 2 * 2 + 4] * 2  # d(x s s + s s)/ds = 2 x s + 2 s, at s = 1, x = 1 and 2
        assert found["strides"] == (True, True)
        assert (found["none"], found["unwatched"]) == (None, [1])


class Chunks(nn.Module):
    """Two blocks, each a chunk, and a parameter outside of them."""

    def __init__(self):
        super().__init__()
        self.outside = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.blocks = nn.ModuleList(nn.Linear(size, 1, bias=False).double() for size in (2, 3))


def of_chunks(frozen):
    mesh, root = Mesh(Layout(1, 2), device=CPU), Chunks()
    data = Replicated(StageCut(root, ["blocks.0", "blocks.1"], [1, 1], pipeline=1, rank=0, device=CPU), root, mesh)
    order, began = [(1, 0), (1, 1), (0, 0), (0, 1)], []
    for window in range(2):
        root.blocks[1].requires_grad_(not (frozen and window))
        root.zero_grad()
        with Messages() as messages:
            data.begin(order, reduce=True)
            for stage, i in order:
                data.before_backward(stage, i)
                began.append(list(messages.sizes))
                weights = root.blocks[stage].weight.sum() + root.outside.sum()
                (weights * (1 + i) * (1 + mesh.data_rank)).backward()
            began.append(list(messages.sizes))
            data.finish()
    return began, [None if p.grad is None else set(p.grad.flatten().tolist()) for p in root.parameters()]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_chunk_is_summed_in_its_last_backward_and_what_lies_outside_in_the_very_last(frozen):
    for began, sums in run_ranks(2, of_chunks, frozen):
        assert began[:5] == [[], [], [3], [3], [3, 2, 5]]
        assert began[5:] == ([[], [], [], [], [2, 5]] if frozen else began[:5])
        assert sums == [{18}, {9}, None if frozen else {9}]  # (1 + 2) micro-batches x (1 + 2) replicas, twice outside


def of_a_failed_step():
    mesh, root = Mesh(Layout(1, 2), device=CPU), nn.Linear(2, 1).double()
    data = Replicated(None, root, mesh)
    data.begin([(0, 0)], reduce=True)
    data.before_backward(0, 0)
    data.abandon()
    root(torch.ones(2, dtype=torch.float64)).sum().backward()
    return root.weight.grad.tolist()


def test_after_a_failed_step_backward_passes_are_the_users_own():
    assert run_ranks(2, of_a_failed_step) == [[[1, 1]]] * 2


def of_nothing_to_sum():
    mesh, root = Mesh(Layout(1, 2), device=CPU), nn.Linear(2, 1).double()
    data = Replicated(None, root, mesh)
    root.requires_grad_(False)
    data.begin([(0, 0)], reduce=True)
    data.before_backward(0, 0)
    data.finish()
    root.requires_grad_(True)
    data.begin([(0, 0)], reduce=False)
    data.before_backward(0, 0)
    root(torch.ones(2, dtype=torch.float64)).sum().backward()
    data.finish()
    return root.weight.grad.tolist()


def test_a_frozen_model_and_a_batch_within_a_window_are_not_summed():
    assert run_ranks(2, of_nothing_to_sum) == [[[1, 1]]] * 2
