"""Data parallelism's step time against Lightning's DDP: whole training steps of two fits that take turns.

``python benchmarks/data_parallel.py`` runs all cases, ``python benchmarks/data_parallel.py CASE`` one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import run
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from turns import NUM_RANKS, race
from typing_extensions import override

from examples.gpt import GPT
from lightning_hybrid import HybridPTDPStrategy


class Wide(LightningModule):
    """A perceptron of 21 million parameters, on few samples: most of a step is the sum of gradients."""

    def __init__(self) -> None:
        super().__init__()
        width = 2048
        self.layers = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(width, width), nn.GELU())))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self.layers(batch), batch)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-4)


def against_ddp(
    case: str,
    make: Callable[[], LightningModule],
    batches: Callable[[int], list[Tensor]],
    target: float,
    zero_stage: int = 0,
    length: int = 1,
    num_turns: int = 40,
) -> None:
    """Train two models of the same weights on the same batches, and compare the times of their turns."""
    dist.init_process_group("gloo")  # one for both: two threads cannot make one each
    strategies = {"ours": HybridPTDPStrategy(1, zero_stage=zero_stage), "ddp": DDPStrategy()}
    race(case, make, strategies, batches, target, length=length, num_turns=num_turns)


def gpt() -> GPT:
    return GPT(width=256, depth=8)


def pieces(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return list(torch.randint(256, (number, 2, 129), generator=generator))


def vectors(number: int) -> list[Tensor]:
    return list(torch.randn(number, 32, 2048))


CASES: dict[str, Callable[[str], None]] = {
    "gpt_zero0": partial(against_ddp, make=gpt, batches=pieces, target=1.05),
    "gpt_zero0_accumulate2": partial(against_ddp, make=gpt, batches=pieces, target=1.05, length=2, num_turns=25),
    "gpt_zero1": partial(against_ddp, make=gpt, batches=pieces, target=1.15, zero_stage=1),
    "wide_zero0": partial(against_ddp, make=Wide, batches=vectors, target=1.05),
    "wide_zero1": partial(against_ddp, make=Wide, batches=vectors, target=1.5, zero_stage=1),
}


if __name__ == "__main__":
    run(__file__, __doc__, {case: (NUM_RANKS, measure) for case, measure in CASES.items()})
