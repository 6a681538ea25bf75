"""Two fits in the same processes that take turns, step by step: what slows the machine slows both."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from threading import Semaphore, Thread
from typing import Any

import torch
import torch.distributed as dist
from common import compare, fit
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.testing import assert_close
from typing_extensions import override

NUM_RANKS = 2


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
        self.losses: list[Tensor] = []
        self.start = 0.0

    def fit(self, module: LightningModule, batches: Sequence[Tensor], strategy: Strategy) -> None:
        """Train in this thread, whenever it is its turn."""
        self.mine.acquire()
        keywords = {"accumulate_grad_batches": self.length, "use_distributed_sampler": False, "callbacks": [self]}
        try:
            fit(module, batches, devices=NUM_RANKS, strategy=strategy, **keywords)
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # the other thread waits for its turn
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
    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        self.losses.append(outputs["loss"])

    @override
    def on_train_end(self, *args: Any) -> None:
        if self.start:
            self.times.append(time.perf_counter() - self.start)


def race(
    case: str,
    make: Callable[[], LightningModule],
    strategies: Mapping[str, Strategy],
    batches: Callable[[int], list[Tensor]],
    target: float,
    *,
    length: int = 1,
    num_turns: int = 40,
) -> None:
    """Train two models of the same weights on the same batches, and compare the times of their turns.

    Args:
        case: Name of the row.
        make: Makes the model.
        strategies: The first is measured in units of the second; keys name them in the row.
        batches: Makes as many batches of this rank.
        target: Of the ratio.
        length: Batches of a turn, which are one optimizer step.
        num_turns: Optimizer steps of each.
    """
    semaphores = [Semaphore(1), Semaphore(0)]
    turns = [Turns(*semaphores, length), Turns(*semaphores[::-1], length)]
    fits, data = [], batches(num_turns * length)
    for turn, strategy in zip(turns, strategies.values(), strict=True):
        seed_everything(0, verbose=False)
        fits.append(Thread(target=turn.fit, args=(make(), data, strategy), daemon=True))
    for thread in fits:
        thread.start()
    for thread in fits:
        thread.join()
    ours, theirs = (_over_ranks(turn.losses) for turn in turns)
    assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=lambda text: f"{case}: not the same work. {text}")
    first, second = strategies
    rows = list(zip(*(turn.times for turn in turns), strict=True))
    compare(case, rows, target, (f"{first}_s", f"{second}_s"))


def _over_ranks(losses: Sequence[Tensor]) -> Tensor:
    """Mean over the ranks, which may have it already."""
    mean = torch.stack([loss.detach() for loss in losses]).double()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()
