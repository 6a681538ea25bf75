"""Blocks with experts in activation checkpoints, over a pipeline and replicas, train as one process without any."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.experts import MoELayer
from tests.launch import run_trainers
from tests.small import Small, fit, hybrid, loader, weights


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.moe = MoELayer(2, 5, 4, balance_loss=0.3, activation="swiglu", shared_experts=1)

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
