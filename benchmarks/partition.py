"""Balanced partitions against equal numbers of blocks, for a GPT whose head costs ten blocks.

``python benchmarks/partition.py`` runs all cases, ``python benchmarks/partition.py CASE`` one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import SleepingBlock, StepTimes, compare, fit, run, typical
from lightning.pytorch import seed_everything
from torch import nn

from examples.gpt import GPT
from lightning_hybrid import HybridPTDPStrategy, measure_costs

NAP = 0.008  # seconds that a block's forward sleeps; its backward takes twice that
WIDTH, DEPTH, HEAVY = 16, 12, 10
P, M = 2, 12


class SleepingHead(SleepingBlock):
    """Sleeps ten times as long as a block; the logits are those of the GPT's own head, which is tiny."""

    def __init__(self, nap: float, width: int) -> None:
        super().__init__(nap, width)
        self.logits = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give the logits, late."""
        return self.logits(super().forward(x))


def gpt(head_width: int) -> GPT:
    """A GPT of sleeping blocks with 10000 parameters each."""
    seed_everything(0, verbose=False)
    model = GPT(width=WIDTH, depth=1)
    model.blocks = nn.ModuleList(SleepingBlock(NAP, 10000) for _ in range(DEPTH))
    model.head = SleepingHead(HEAVY * NAP, head_width)
    return model


def balanced_against_equal(case: str, head_width: int, measured: bool, rounds: int = 4, num_steps: int = 3) -> None:
    seed_everything(0, verbose=False)
    batches = list(torch.randint(256, (num_steps, M, 33)))
    costs = measure_costs(gpt(head_width), batches[0][:1]) if measured else None

    def step_time(**options: Any) -> float:
        times = StepTimes()
        strategy = HybridPTDPStrategy(P, num_microbatches=M, **options)
        fit(gpt(head_width), batches, devices=P, strategy=strategy, callbacks=[times])
        return typical(times.times)

    equal, balanced = partial(step_time, partition="uniform"), partial(step_time, block_costs=costs)
    rows = [[equal(), balanced()] if i % 2 else [balanced(), equal()][::-1] for i in range(rounds)]
    compare(case, rows, 1.3, ("equal_s", "balanced_s"), at_least=True)


CASES: dict[str, Callable[[str], None]] = {
    "balanced_by_parameters": partial(balanced_against_equal, head_width=100000, measured=False),
    "balanced_by_measured_costs": partial(balanced_against_equal, head_width=1, measured=True),
}


if __name__ == "__main__":
    run(__file__, __doc__, {case: (P, measure) for case, measure in CASES.items()})
