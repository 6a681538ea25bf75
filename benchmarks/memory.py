"""Holding less: measured bytes against laws, plans against all there are, time of recomputation against one forward.

``python benchmarks/memory.py`` runs all cases, ``python benchmarks/memory.py CASE`` one of them.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from statistics import median
from typing import Any

import torch
from common import fit, report, run
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from typing_extensions import override

from lightning_hybrid.callbacks import ActivationOffload, ActivationRecompute, MemoryLedger, ParameterOffload
from lightning_hybrid.functional.recomputation import cheapest_segments, smallest_budget, square_root_segments
from lightning_hybrid.functional.segments import BlockCost, Segment, extra_seconds, peak_bytes

BOUNDARY, INTERNAL = 1, 5  # bytes of a residual block with a hidden layer four times as wide, in those of its input
NUM_DRAWS = 200


class Block(nn.Module):
    """A residual block with its activation first, so that no operation saves the block's own input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x + self.shrink(torch.relu(self.grow(torch.relu(x))))


class Blocks(LightningModule):
    """Nothing but equal blocks, and a loss that saves nothing."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        seed_everything(0, verbose=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.forward_seconds: list[float] = []

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        start = time.process_time()
        for block in self.blocks:
            batch = block(batch)
        loss = batch.mean()
        self.forward_seconds.append(time.process_time() - start)
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def train(model: Blocks, num_steps: int, batch: int, *callbacks: Callback) -> None:
    """Train on batches with storages of their own, without the tables that callbacks print."""
    width = model.blocks[0].grow.in_features
    with redirect_stdout(StringIO()):
        fit(model, [torch.randn(batch, width) for _ in range(num_steps)], callbacks=list(callbacks))


class Times(Callback):
    """Seconds of each step, of the processor: of one thread that never waits, and of nobody else on the machine."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    @override
    def on_train_batch_start(self, *args: Any) -> None:
        self.start = time.process_time()

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        self.seconds.append(time.process_time() - self.start)


def law(num_blocks: int, boundary: int, internal: int) -> int:
    """Fewest bytes of equal blocks in segments that are all recomputed."""
    return min(k * boundary + math.ceil(num_blocks / k) * internal for k in range(1, num_blocks + 1))


def planned(case: str, num_blocks: int) -> None:
    """Bytes of the plan for equal blocks, over the formula, and the least of any plan."""
    costs = [BlockCost(BOUNDARY, INTERNAL, seconds=1.0)] * num_blocks
    needed = peak_bytes(costs, square_root_segments(costs))
    everything = sum(block.kept for block in costs)
    formula = law(num_blocks, BOUNDARY, INTERNAL)
    report(
        case,
        needed / formula,
        1.0,
        share_of_all=needed / everything,
        least_over_formula=smallest_budget(costs) / formula,
    )


def every_plan(start: int, num_blocks: int) -> Iterator[list[Segment]]:
    """All plans of the blocks from one on."""
    if start == num_blocks:
        yield []
    for stop in range(start + 1, num_blocks + 1):
        for rest in every_plan(stop, num_blocks):
            yield [Segment(start, stop, True), *rest]
            if stop == start + 1:
                yield [Segment(start, stop, False), *rest]


def brute_force(case: str) -> None:
    """Share of small random models, budgets and pipelines whose plan takes the time of the best of all plans."""
    draw, equal, slower = random.Random(0), 0, list[float]()
    for _ in range(NUM_DRAWS):
        costs = [
            BlockCost(draw.randint(0, 9), draw.randint(0, 20), draw.randint(0, 9), draw.randint(1, 9))
            for _ in range(draw.randint(1, 7))
        ]
        in_flight = draw.randint(1, 3)
        smallest, everything = smallest_budget(costs, in_flight), in_flight * sum(block.kept for block in costs)
        budget = draw.randint(smallest, max(smallest, everything))
        fitting = [plan for plan in every_plan(0, len(costs)) if peak_bytes(costs, plan, in_flight) <= budget]
        best = min(extra_seconds(costs, plan) for plan in fitting)
        time = extra_seconds(costs, cheapest_segments(costs, budget, in_flight))
        equal += time == best
        slower.append(time - best)
    report(case, equal / NUM_DRAWS, 1.0, at_least=True, most_seconds_more=max(slower))


def measured(case: str, num_blocks: int, width: int = 32, batch: int = 8) -> None:
    """Most bytes that a step with ``"sqrt"`` holds for backward, over the formula."""
    ledger, recompute = MemoryLedger(), ActivationRecompute("sqrt")
    train(Blocks(width, num_blocks), 3, batch, recompute, ledger)
    row = 4 * width * batch
    needed, everything = sum(ledger.last.activations.values()), num_blocks * INTERNAL * row
    formula = law(num_blocks, BOUNDARY * row, INTERNAL * row)
    report(case, needed / formula, 1.0, share_of_all=needed / everything, segments=len(recompute.plan))


def step_seconds(recompute: ActivationRecompute | None, width: int, batch: int, depth: int) -> tuple[float, float]:
    """Of a step and of its forward, once there is a plan."""
    model, times = Blocks(width, depth), Times()
    train(model, 8, batch, times, *([] if recompute is None else [recompute]))
    return median(times.seconds[3:]), median(model.forward_seconds[3:])


def extra_time(case: str, rounds: int = 5, width: int = 256, batch: int = 256, depth: int = 8, **options: Any) -> None:
    """A step with recomputation over the plain step and one forward."""
    ratios, forwards = list[float](), list[float]()
    for _ in range(rounds):
        plain, forward = step_seconds(None, width, batch, depth)
        step, _ = step_seconds(ActivationRecompute(**options), width, batch, depth)
        ratios.append(step / (plain + forward))
        forwards.append((step - plain) / forward)
    report(case, median(ratios), 1.0, extra_forwards=median(forwards))


class DeviceBytes(Callback):
    """Most bytes of parameters on the device, at the ends of steps."""

    most, units = 0, 0

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        streaming = next(c.streaming for c in trainer.callbacks if isinstance(c, ParameterOffload))
        assert streaming is not None
        self.most = max(self.most, streaming.device_bytes)
        self.units = len(streaming.units)


def offloaded(case: str, num_blocks: int, width: int = 32, batch: int = 8) -> None:
    """Most bytes on the device that a step holds for backward, over those of two blocks; what left is on the host."""
    ledger, offload = MemoryLedger(), ActivationOffload(min_bytes=0)
    train(Blocks(width, num_blocks), 3, batch, offload, ledger)
    block = (INTERNAL + BOUNDARY) * 4 * width * batch  # a block's input leaves with the block before it, or it
    needed, on_host = sum(ledger.last.activations.values()), sum(ledger.last.offloaded.values())
    everything = num_blocks * INTERNAL * 4 * width * batch
    report(case, needed / (2 * block), 1.0, share_of_all=needed / everything, on_host=on_host / everything)


def streamed(case: str, num_blocks: int, width: int = 64, batch: int = 8) -> None:
    """Bytes of parameters on the device over those of two buffers, and whether weights are those of a plain run."""
    offload, watch = ParameterOffload(num_buffers=2), DeviceBytes()
    plain = Blocks(width, num_blocks)
    train(plain, 6, batch)
    streams = Blocks(width, num_blocks)  # which seeds what follows, too
    train(streams, 6, batch, offload, watch)
    pairs = zip(plain.parameters(), streams.parameters(), strict=True)
    same = all(torch.equal(one, other) for one, other in pairs)
    whole = sum(parameter.nbytes for parameter in plain.parameters())
    buffers = 2 * whole / num_blocks
    counts, sizes = offload.counts, {"model_over_buffers": whole / buffers, "same_bits": float(same)}
    report(case, watch.most / buffers, 1.0, **sizes, late_copies=counts.waits / max(1, counts.fetches))


HALF = 4 * 256 * 256 * 8 * INTERNAL // 2  # bytes: half of what the blocks of `extra_time` save

CASES = {
    **{f"sqrt_law_l{n}": (1, partial(planned, num_blocks=n)) for n in (4, 16, 64, 256)},
    "budget_brute_force": (1, brute_force),
    **{f"sqrt_measured_l{n}": (1, partial(measured, num_blocks=n)) for n in (4, 16, 64, 256)},
    **{f"offload_two_blocks_l{n}": (1, partial(offloaded, num_blocks=n)) for n in (4, 64)},
    "stream_model_4x_over_buffers": (1, partial(streamed, num_blocks=8)),
    "extra_time_full": (1, partial(extra_time, policy="full")),
    "extra_time_sqrt": (1, partial(extra_time, policy="sqrt")),
    "extra_time_budget_half": (1, partial(extra_time, budget_bytes=HALF)),
}


if __name__ == "__main__":
    run(__file__, __doc__, CASES)
