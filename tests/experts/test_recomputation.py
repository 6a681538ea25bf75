"""Blocks with experts over a pipeline and replicas, in activation checkpoints too, balance as in one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_hybrid.experts import MoELayer
from tests.launch import run_trainers
from tests.small import Small, fit, hybrid, loader, samples, weights


class Block(nn.Module):
    over = "sequence"

    def __init__(self):
        super().__init__()
        self.moe = MoELayer(2, 5, 4, balance_loss=0.3, balance_over=self.over, activation="swiglu", shared_experts=1)

    def forward(self, x):
        return x + self.moe(x.view(len(x), 3, 2)).view(x.shape)  # a sample is a sequence


class Reentrant(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


class NonReentrant(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Plain(Small):
    block = Block


class OverBatch(Block):
    over = "micro_batch"


class ReentrantOverBatch(Reentrant):
    over = "micro_batch"


class OverWindow(NonReentrant):
    over = "global"


class ReentrantOverWindow(Reentrant):
    over = "global"


def trained(kinds, data, options):
    """Weights after three steps of each kind of blocks."""
    found = []
    for block in kinds:
        model = type("Checkpointed", (Plain,), {"block": block})()
        found.append(dict(weights(fit(model, loader(15 * data, 5 * data, data), hybrid(**options)))))
    return found


@pytest.mark.parametrize(
    ("pipeline", "data", "chunks"), [(2, 1, 2), pytest.param(2, 2, 1, marks=pytest.mark.full), (1, 2, 1)]
)
def test_blocks_in_checkpoints_balance_as_one_process_does(pipeline, data, chunks):
    kinds, options = [Block, Reentrant, NonReentrant], {"pipeline": pipeline, "chunks": chunks}
    found = run_trainers(pipeline * data, trained, kinds, data, options)[0]
    expected = dict(weights(fit(Plain(), loader(15 * data, 5 * data))))
    torch.testing.assert_close(found, [expected] * len(kinds))


def trained_over(kinds, stages):
    options = {"pipeline": 1, "microbatches": 1}
    return [trained([kind], 2, options | {"zero_stage": stage})[0] for kind, stage in zip(kinds, stages, strict=True)]


def test_replicas_with_one_microbatch_balance_over_their_whole_batch():
    kinds = [OverBatch, ReentrantOverBatch, OverWindow, ReentrantOverWindow]
    found = run_trainers(2, trained_over, kinds, [0, 1, 3, 2])[0]
    whole = type("Whole", (Plain,), {"block": OverBatch})()
    expected = dict(weights(fit(whole, loader(30, 10))))
    torch.testing.assert_close(found, [expected] * len(kinds))


def uneven():
    """A replica with three samples for three micro-batches, and one with a single sample."""
    number = 3 if dist.get_rank() == 0 else 1
    whole = type("Whole", (Plain,), {"block": OverBatch})()
    strategy = hybrid(pipeline=1, microbatches=3, zero_stage=1)
    return fit(whole, DataLoader(samples(number), number), strategy, use_distributed_sampler=False).global_step


def test_replicas_that_count_together_run_equally_many_microbatches():
    assert run_trainers(2, uneven) == [1, 1]
