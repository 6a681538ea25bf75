"""Blocks with experts over a pipeline and replicas, in activation checkpoints too, balance as in one process."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.experts import MoELayer
from tests.launch import run_trainers
from tests.small import Small, fit, hybrid, loader, weights


class Block(nn.Module):
    over = "sequence"

    def __init__(self):
        super().__init__()
        self.moe = MoELayer(
            2, 5, 4, balance_loss=0.3, balance_over=self.over, activation="swiglu", shared_experts=1
        )

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
