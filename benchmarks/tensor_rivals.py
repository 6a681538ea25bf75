"""What `tensor.py` is compared with: a GPT that is split by hand, and a model that DTensor splits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from typing_extensions import override

from examples.gpt import GPT, Block


class _Enter(torch.autograd.Function):
    """``f`` of Shoeybi et al. 2019 (arXiv:1909.08053, figure 3): the gradients of all ranks add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].contiguous()
        dist.all_reduce(total)
        return total


class _Leave(torch.autograd.Function):
    """``g``: the parts of all ranks add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class HandBlock(nn.Module):
    """A rank's part of the example's block: its heads, and its share of the perceptron's hidden features."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        self.heads, self.norm1, self.norm2 = block.heads // size, block.norm1, block.norm2
        self.qkv, self.out, self.grow, self.shrink = block.qkv, block.out, block.grow, block.shrink
        queries = block.qkv.weight.detach().unflatten(0, (3, size, -1))[:, rank].flatten(0, 1)
        self.qkv.weight = nn.Parameter(queries.clone())
        self.out.weight = nn.Parameter(block.out.weight.detach().chunk(size, dim=1)[rank].clone())
        self.grow.weight = nn.Parameter(block.grow.weight.detach().chunk(size)[rank].clone())
        self.grow.bias = nn.Parameter(block.grow.bias.detach().chunk(size)[rank].clone())
        self.shrink.weight = nn.Parameter(block.shrink.weight.detach().chunk(size, dim=1)[rank].clone())

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(_Enter.apply(self.norm1(x)))
        q, k, v = y.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + _Leave.apply(self.out(mixed.transpose(1, 2).flatten(2)))
        y = F.gelu(self.grow(_Enter.apply(self.norm2(x))))
        return x + _Leave.apply(F.linear(y, self.shrink.weight)) + self.shrink.bias


class Losses(nn.Module):
    """Calls a model's own layers for a loss; parameters keep their names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._modules = model._modules

    @override
    def forward(self, batch: Tensor) -> Tensor:
        x = self.embed(batch[:, :-1]) + self.position.weight[: batch.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch[:, 1:].flatten())


def by_hand(gpt: GPT) -> Losses:
    """The example's GPT with its blocks split over all ranks."""
    gpt.blocks = nn.ModuleList(HandBlock(block) for block in gpt.blocks)
    return Losses(gpt)


class Attention(nn.Module):
    """Grouped queries, each kind with a layer of its own. Numbers of heads follow from sizes."""

    def __init__(self, width: int, heads: int, pairs: int) -> None:
        super().__init__()
        self.head = width // heads
        self.q_proj, self.o_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(width, pairs * self.head, bias=False) for _ in range(2))

    @override
    def forward(self, x: Tensor) -> Tensor:
        layers = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in layers)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """A gated perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down_proj = nn.Linear(3 * width, width, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class GQABlock(nn.Module):
    """Both, each with a norm before and a skip around."""

    def __init__(self, width: int, heads: int, pairs: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.mlp = Attention(width, heads, pairs), Gated(width)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GQA(LightningModule):
    """A byte-level model of such blocks.

    Args:
        width: Features of a byte.
        depth: Number of blocks.
        heads: Query heads.
        pairs: Heads of keys and values.
    """

    def __init__(self, width: int, depth: int, heads: int, pairs: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(128, width)
        self.blocks = nn.ModuleList(GQABlock(width, heads, pairs) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(batch[:, :-1]) + self.position.weight[: batch.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch[:, 1:].flatten())

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def by_dtensor(model: GQA) -> Losses:
    """That model with its blocks split over all ranks by torch's plans, which convert each input once."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    once = {"input_layouts": (Replicate(),), "desired_input_layouts": (Replicate(),)}
    columns = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan = {name: PrepareModuleInput(**once) for name in ("attention", "mlp")}
    plan |= {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("attention.o_proj", "mlp.down_proj")}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return Losses(model)
