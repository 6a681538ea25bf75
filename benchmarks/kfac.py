"""What `KFACPreconditioner` adds to a step of SGD on the example's GPT, and what it keeps.

``python benchmarks/kfac.py`` runs all cases, ``python benchmarks/kfac.py CASE`` one of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from statistics import median
from typing import Any

import torch
from callbacks import BATCH, CONTEXT, NUM_ROUNDS
from common import fit, report, run
from lightning.pytorch import Callback, seed_everything
from torch import Tensor
from typing_extensions import override

from examples.gpt import GPT
from lightning_hybrid.callbacks import KFACPreconditioner

NUM_STEPS, NUM_WARM = 14, 2
FACTOR_EVERY, INVERSE_EVERY = 10, 100  # that times are amortised over
MEASURED = {"factor_every": 2, "inverse_every": 4}  # that they are measured with, in short fits
TARGET = 1.3
CASES_OF: dict[str, dict[str, Any]] = {
    "inverse": {"method": "inverse"},
    "eigen": {"method": "eigen"},
}


class WithSGD(GPT):
    """The example with plain SGD."""

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Times(Callback):
    """Seconds of each step, of the processor: of one thread that never waits, and of nobody else on the machine."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.start = 0.0

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.start = time.process_time()

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seconds.append(time.process_time() - self.start)


def step_seconds(callbacks: list[Callback]) -> list[float]:
    """Of each step of a short fit."""
    seed_everything(0, verbose=False)
    batches: list[Tensor] = [torch.randint(256, (2 * BATCH, CONTEXT + 1)) for _ in range(NUM_STEPS)]
    times = Times()
    with redirect_stdout(StringIO()):
        fit(WithSGD(context=CONTEXT), batches, callbacks=[times, *callbacks])
    return times.seconds


def overhead(case: str) -> None:
    """A step with natural gradients, with its share of new factors and inverses, over a plain one."""
    step_seconds([])
    found: list[tuple[float, float, float, float]] = []
    for i in range(NUM_ROUNDS):
        jobs: list[list[Callback]] = [[], [KFACPreconditioner(**MEASURED, **CASES_OF[case])]]
        seconds = {bool(job): step_seconds(job)[NUM_WARM:] for job in jobs[:: 1 if i % 2 else -1]}
        steps = range(NUM_WARM, NUM_STEPS)
        own = dict(zip(steps, seconds[True], strict=True))
        ordinary = median(t for step, t in own.items() if step % 2)
        factors = median(t for step, t in own.items() if step % 4 == 2) - ordinary
        inverses = median(t for step, t in own.items() if step % 4 == 0) - ordinary - factors
        found.append((median(seconds[False]), ordinary, factors, inverses))
    amortised = [
        (ordinary + factors / FACTOR_EVERY + inverses / INVERSE_EVERY) / plain
        for plain, ordinary, factors, inverses in found
    ]
    names = ("plain_s", "step_s", "factors_s", "inverses_s")
    parts = {name: median(column) for name, column in zip(names, zip(*found, strict=True), strict=True)}
    report(case, median(amortised), TARGET, **parts)


def memory(case: str) -> None:
    """Bytes of factors and inverses over those of parameters."""
    kfac, module = KFACPreconditioner(method="inverse"), WithSGD(context=CONTEXT)
    with redirect_stdout(StringIO()):
        fit(module, [torch.randint(256, (2, CONTEXT + 1))], callbacks=[kfac])
    parameters = sum(parameter.nbytes for parameter in module.parameters())
    report(case, kfac.num_bytes / parameters, 10.0, num_bytes=kfac.num_bytes)


CASES: dict[str, tuple[int, Callable[[str], None]]] = {
    **dict.fromkeys(CASES_OF, (1, overhead)),
    "memory": (1, memory),
}


if __name__ == "__main__":
    run(__file__, __doc__, CASES)
