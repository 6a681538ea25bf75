"""What callbacks for large batches add to a step of the example's GPT: short fits take turns in one process.

``python benchmarks/callbacks.py`` runs all cases, ``python benchmarks/callbacks.py CASE`` one of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from statistics import median
from typing import Any

import torch
from common import fit, report, run
from lightning.pytorch import Callback, seed_everything
from torch import Tensor
from typing_extensions import override

from examples.gpt import GPT
from lightning_hybrid.callbacks import (
    GradientNoise,
    GradientNoiseScaleMonitor,
    LearningRateScaling,
    LearningRateWarmup,
    OptimizerRestart,
    UtilizationMonitor,
)

CONTEXT, BATCH, ACCUMULATE = 128, 4, 2
NUM_ROUNDS, NUM_STEPS, NUM_WARM = 21, 10, 2
SMALL, LARGE = 1.02, 1.25  # targets: of what has nothing to compute, and of what goes over all gradients

CALLBACKS: dict[str, tuple[Callable[[], list[Callback]], float]] = {
    "rates": (lambda: [LearningRateScaling(8), LearningRateWarmup(steps=1000)], SMALL),
    "restart": (lambda: [OptimizerRestart(every=1000, rewarm=10)], SMALL),
    "utilization": (lambda: [UtilizationMonitor()], SMALL),
    "noise": (lambda: [GradientNoise()], LARGE),
    "noise_scale": (lambda: [GradientNoiseScaleMonitor()], LARGE),
}


class Times(Callback):
    """Seconds of each step, of the processor: of one thread that never waits, and of nobody else on the machine."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.start = 0.0

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % ACCUMULATE == 0:
            if batch_idx:
                self.seconds.append(time.process_time() - self.start)
            self.start = time.process_time()


def step_seconds(make: Callable[[], list[Callback]]) -> float:
    """Of a step with callbacks: the median of a short fit."""
    seed_everything(0, verbose=False)
    batches: list[Tensor] = [torch.randint(256, (BATCH, CONTEXT + 1)) for _ in range(ACCUMULATE * NUM_STEPS)]
    times = Times()
    keywords = {"callbacks": [times, *make()], "accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": 1.0}
    with redirect_stdout(StringIO()):
        fit(GPT(context=CONTEXT), batches, **keywords)
    return median(times.seconds[NUM_WARM:])


def overhead(case: str) -> None:
    """Times of steps with the callbacks of a case over those of steps without any."""
    make, target = CALLBACKS[case]
    ratios, plain = [], []
    for i in range(NUM_ROUNDS):
        order = [list, make][:: 1 if i % 2 else -1]
        found = {job is make: step_seconds(job) for job in order}
        ratios.append(found[True] / found[False])
        plain.append(found[False])
    report(case, median(ratios), target, plain_s=median(plain))


CASES: dict[str, tuple[int, Callable[[str], None]]] = dict.fromkeys(CALLBACKS, (1, overhead))


if __name__ == "__main__":
    run(__file__, __doc__, CASES)
