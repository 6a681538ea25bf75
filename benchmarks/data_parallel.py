"""Data parallelism's step time against Lightning's DDP: whole training steps of two fits that take turns.

``python benchmarks/data_parallel.py`` runs all cases, ``python benchmarks/data_parallel.py CASE`` one of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from threading import Semaphore, Thread
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import compare, fit, run
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close
from typing_extensions import override

from examples.gpt import GPT
from lightning_hybrid import HybridPTDPStrategy

NUM_RANKS = 2


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


class Turns(Callback):
    """Lets two fits in two threads run by turns, and times each turn: from the start of a step to that of another.

    Args:
        mine: Released when this fit may go on.
        others: Released when the other may.
        length: Batches of a turn.
    """

    def __init__(self, mine: Semaphore, others: Semaphore, length: int) -> None:
        self.mine, self.others, self.length = mine, others, length
        self.times: list[float] = []
        self.start = 0.0
        self.gradients: list[Tensor] = []

    def fit(self, module: LightningModule, batches: Sequence[Tensor], strategy: Strategy) -> None:
        """Train in this thread, whenever it is its turn."""
        self.mine.acquire()
        keywords = {"accumulate_grad_batches": self.length, "use_distributed_sampler": False, "callbacks": [self]}
        try:
            fit(module, batches, devices=NUM_RANKS, strategy=strategy, **keywords)
        finally:
            self.others.release()  # for good

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.length == 0:
            self.on_train_end()
            self.others.release()
            self.mine.acquire()
            dist.barrier()  # so that no rank times another's lateness
            self.start = time.perf_counter()

    @override
    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        if not self.gradients:
            gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
            self.gradients = [g.full_tensor() if isinstance(g, DTensor) else g.clone() for g in gradients]

    @override
    def on_train_end(self, *args: Any) -> None:
        if self.start:
            self.times.append(time.perf_counter() - self.start)


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
    strategies: list[Strategy] = [HybridPTDPStrategy(1, zero_stage=zero_stage), DDPStrategy()]
    ours, theirs = Semaphore(1), Semaphore(0)
    turns = [Turns(ours, theirs, length), Turns(theirs, ours, length)]
    models, data = [], batches(num_turns * length)
    for _ in strategies:
        seed_everything(0, verbose=False)
        models.append(make())
    fits = [
        Thread(target=turn.fit, args=(model, data, strategy), daemon=True)
        for turn, model, strategy in zip(turns, models, strategies, strict=True)
    ]
    for thread in fits:
        thread.start()
    for thread in fits:
        thread.join()
    assert_close(*(turn.gradients for turn in turns), msg="not the same work")
    rows = list(zip(*(turn.times for turn in turns), strict=True))
    compare(case, rows, target, ("ours_s", "ddp_s"))
    dist.destroy_process_group()


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
