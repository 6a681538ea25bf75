"""Tensor parallelism written by hand, as Megatron's layers are: what is around the split matrices is tested with it."""

from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lightning_hybrid.functional.splits import Split
from lightning_hybrid.parallel.tensor.assignment import Assignment
from lightning_hybrid.strategies import assembling, survey
from tests.small import WIDTH, Small

HIDDEN = 5  # not divisible by 2


class Mlp(nn.Module):
    """A block: two matrices, and a bias behind the second that each rank adds a part of."""

    axis = None  # of a rank that has slices

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = self.norm(x)
        if self.axis is None:
            return x + self.down(torch.tanh(self.up(x)))
        assert self.axis.active
        hidden = torch.tanh(self.up(_Enter.apply(x, self.axis)))
        return x + _Reduce.apply(F.linear(hidden, self.down.weight, self.down.bias / self.axis.size), self.axis)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.axis.group)
        return gradient, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        x = x.clone()
        dist.all_reduce(x, group=axis.group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class SmallMlps(Small):
    block, depth = Mlp, 4


def plan(root, blocks, size, plan, *, sequence_parallel):
    """An assignment for both matrices of each block."""
    rows, columns = Split(0, (HIDDEN,)), Split(1, (HIDDEN,))
    ups = [Assignment(f"{block}.up", "colwise", {"weight": rows, "bias": rows}) for block in blocks]
    return [*ups, *(Assignment(f"{block}.down", "rowwise", {"weight": columns}, ("bias",)) for block in blocks)]


def install(root, runs, tensor, assignments, *, sequence_parallel):
    for module in root.modules():
        if isinstance(module, Mlp):
            module.axis = tensor.axis


@contextmanager
def split_by_hand():
    """Context in which the strategy's tensor parallelism is the one here."""
    with (
        patch.multiple(survey, make_plan=plan, plan_table=lambda *args, **kwargs: "the plan"),
        patch.object(assembling, "install", install),
    ):
        yield
