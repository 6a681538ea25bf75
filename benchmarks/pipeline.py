"""The pipeline's step time: against the schedule's theory, against torch's own pipelining, and in one process.

``python benchmarks/pipeline.py`` runs all cases, ``python benchmarks/pipeline.py CASE`` one of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property, partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import SleepingBlock, StepTimes, compare, fit, report, run, seconds, typical
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.testing import assert_close
from typing_extensions import override

from examples.gpt import GPT
from lightning_hybrid import HybridPTDPStrategy
from lightning_hybrid.functional.simulation import theoretical_bubble_ratio

NAP = 0.02  # seconds that a block's forward sleeps; its backward takes twice that
BLOCKS_A_RANK = 2


# A schedule of sleeping blocks against its theory


class Sleeper(LightningModule):
    """A stack of sleeping blocks."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SleepingBlock(NAP) for _ in range(depth))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def against_theory(case: str, p: int, m: int, v: int, num_steps: int = 20) -> None:
    times = StepTimes()
    strategy = HybridPTDPStrategy(p, num_chunks=v, num_microbatches=m, partition="uniform")
    seed_everything(0, verbose=False)
    batches = [torch.randn(m, 64, 64)] * num_steps
    fit(Sleeper(p * BLOCKS_A_RANK), batches, devices=p, strategy=strategy, callbacks=[times])
    step = typical(times.times)
    theory = m * BLOCKS_A_RANK * 3 * NAP * (1 + theoretical_bubble_ratio(p, m, v))
    report(case, step / theory, 1.05, step_s=step, theory_s=theory)


# A GPT against torch.distributed.pipelining


class Part(nn.Module):
    """The stage of a GPT that torch's pipelining runs on one rank; its model has to be cut by hand."""

    def __init__(self, gpt: GPT, rank: int, size: int) -> None:
        super().__init__()
        share = len(gpt.blocks) // size
        self.gpt, self.blocks = gpt, gpt.blocks[rank * share : (rank + 1) * share]
        self.is_first, self.is_last = rank == 0, rank == size - 1

    @override
    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.gpt.embed(x) + self.gpt.position.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.gpt.head(self.gpt.norm(x)) if self.is_last else x


class Rival:
    """The same model under ``Schedule1F1B``."""

    def __init__(self, gpt: GPT, size: int, m: int) -> None:
        self.gpt = gpt
        part = Part(gpt, dist.get_rank(), size)
        stage = PipelineStage(part, dist.get_rank(), size, torch.device("cpu"))
        self.schedule, self.part = Schedule1F1B(stage, m, loss_fn=self._loss), part

    def step(self, batch: Tensor) -> None:
        """Run forward and backward of all micro-batches."""
        inputs = [batch[:, :-1]] if self.part.is_first else []
        self.schedule.step(*inputs, target=batch[:, 1:] if self.part.is_last else None, return_outputs=False)

    @staticmethod
    def _loss(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def gpt() -> GPT:
    seed_everything(0, verbose=False)
    return GPT(width=256, depth=8)


class Interleaved(HybridPTDPStrategy):
    """Times each of its steps, forward and backward of all micro-batches, beside one of a rival on the same batch."""

    def __init__(self, p: int, m: int) -> None:
        super().__init__(p, num_microbatches=m, schedule="1f1b", partition="uniform")
        self.rows: list[list[float]] = []
        self.make_rival = partial(Rival, size=p, m=m)

    @cached_property
    def rival(self) -> Rival:
        """A second model of the same weights, made when there is a process group."""
        return self.make_rival(gpt())

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.rival.gpt.zero_grad()
        outputs = []
        ours = partial(seconds, lambda: outputs.append(super(Interleaved, self).training_step(batch, batch_idx)))
        theirs = partial(seconds, lambda: self.rival.step(batch))
        self.rows.append([ours(), theirs()] if batch_idx % 2 else [theirs(), ours()][::-1])
        if batch_idx == 0:
            self._check()
        return outputs[0]

    def _check(self) -> None:
        names = {id(parameter): name for name, parameter in self.lightning_module.named_parameters()}
        for parameter, gradient in self._training.taken:
            assert_close(gradient, self.rival.gpt.get_parameter(names[id(parameter)]).grad)


def against_torch(case: str, p: int, m: int, num_steps: int = 40) -> None:
    strategy, model = Interleaved(p, m), gpt()
    fit(model, list(torch.randint(256, (num_steps, 16, 129))), devices=p, strategy=strategy)
    compare(case, strategy.rows, 1.03, ("ours_s", "torch_s"))


# A step that meets a new shape against one that does not


def new_shape(case: str, p: int, m: int, num_pairs: int = 25) -> None:
    """Each length comes twice in a row: its first step probes it."""
    seed_everything(0, verbose=False)
    lengths = [128 - i for i in range(num_pairs) for _ in range(2)]
    times = StepTimes()
    strategy = HybridPTDPStrategy(p, num_microbatches=m, partition="uniform")
    batches = [torch.randint(256, (16, length + 1)) for length in lengths]
    fit(gpt(), batches, devices=p, strategy=strategy, callbacks=[times])
    compare(case, list(zip(times.times[::2], times.times[1::2], strict=True)), 1.15, ("new_s", "known_s"))


# One process against Lightning's own strategy


class LoopTimes(Callback):
    """Times from the start of a step to the start of the next."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    @override
    def on_train_batch_start(self, *args: Any) -> None:
        self.starts.append(time.perf_counter())

    @property
    def typical(self) -> float:
        """Median, without the first fifth."""
        late = self.starts[len(self.starts) // 5 :]
        return median(b - a for a, b in pairwise(late))


class Perceptron(LightningModule):
    """Three layers, so small that what a strategy adds to a step would show."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 256))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.layers(batch), batch)
        self.log("loss", loss)
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def against_plain(case: str, rounds: int = 40, num_steps: int = 50) -> None:
    batches = list(torch.randn(num_steps, 128, 256))

    def ours() -> float:
        times = LoopTimes()
        fit(Perceptron(), batches, devices=1, strategy=HybridPTDPStrategy(), callbacks=[times])
        dist.destroy_process_group()  # the other fit is of a process that never had one
        return times.typical

    def plain() -> float:
        times = LoopTimes()
        fit(Perceptron(), batches, devices=1, strategy="auto", callbacks=[times])
        return times.typical

    rows = [[ours(), plain()] if i % 2 else [plain(), ours()][::-1] for i in range(rounds)]
    compare(case, rows, 1.02, ("ours_s", "plain_s"))


CASES: dict[str, tuple[int, Callable[[str], None]]] = {  # name: (number of ranks, what each runs)
    "sleep_p2_m4_v1": (2, partial(against_theory, p=2, m=4, v=1)),
    "sleep_p4_m8_v1": (4, partial(against_theory, p=4, m=8, v=1)),
    "sleep_p4_m8_v2": (4, partial(against_theory, p=4, m=8, v=2)),
    "torch_p2_m4": (2, partial(against_torch, p=2, m=4)),
    "torch_p2_m8": (2, partial(against_torch, p=2, m=8)),
    "torch_p4_m8": (4, partial(against_torch, p=4, m=8)),
    "new_shape_p2_m8": (2, partial(new_shape, p=2, m=8)),
    "one_process": (1, against_plain),
}


if __name__ == "__main__":
    run(__file__, __doc__, CASES)
