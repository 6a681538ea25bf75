"""float16 over float32 masters on one device, against torch's AMP and float32: time of a step, and most memory.

``python benchmarks/device.py`` runs all cases, ``python benchmarks/device.py CASE`` one of them. The figures are about
a GPU; without one it trains a small model on the CPU, which shows that the cases run, and leaves memory out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import compare, report, run
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader
from typing_extensions import override

from examples.gpt import GPT
from lightning_hybrid import HybridPTDPStrategy
from lightning_hybrid.precision import FP16MasterWeights

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {"width": 1024, "depth": 24, "heads": 16} if DEVICE == "cuda" else {"width": 64, "depth": 2, "heads": 4}
CONTEXT, BATCH = (1024, 8) if DEVICE == "cuda" else (128, 4)
NUM_ROUNDS, NUM_STEPS, NUM_WARM = 5, 12, 4

RIVALS: dict[str, Callable[[], dict[str, Any]]] = {
    "amp": lambda: {"plugins": [MixedPrecision("16-mixed", DEVICE)]},
    "fp32": lambda: {"precision": "32-true"},
    "masters": lambda: {
        "strategy": HybridPTDPStrategy(1, num_microbatches=1),
        "plugins": [FP16MasterWeights(init_scale=2.0**12)],
    },
}


class Steps(Callback):
    """Times of steps, of work that is done."""

    def __init__(self) -> None:
        self.times: list[float] = []

    @override
    def on_train_batch_start(self, *args: Any) -> None:
        _wait()
        self._start = time.perf_counter()

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        _wait()
        self.times.append(time.perf_counter() - self._start)


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def train(options: dict[str, Any]) -> tuple[float, float]:
    """(typical seconds of a step, most bytes) of a fit."""
    seed_everything(0, verbose=False)
    steps, model = Steps(), GPT(**SIZES, context=CONTEXT)
    batches = DataLoader(list(torch.randint(256, (NUM_STEPS, BATCH, CONTEXT + 1))), batch_size=None)
    bare = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    accelerator = "gpu" if DEVICE == "cuda" else "cpu"
    options = {"accelerator": accelerator, "devices": 1, "limit_val_batches": 0, **options}
    Trainer(max_epochs=1, callbacks=[steps], **dict.fromkeys(bare, False), **options).fit(model, batches)
    used = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
    return median(steps.times[NUM_WARM:]), float(used)


def over(case: str, rival: str) -> None:
    """Fits take turns; each round has its own ratio."""
    rows = [[train(RIVALS[name]()) for name in ("masters", rival)] for _ in range(NUM_ROUNDS)]
    times = [[seconds for seconds, _ in row] for row in rows]
    compare(f"{case}_time_{DEVICE}", times, 1.0, ("masters_s", f"{rival}_s"))
    if DEVICE == "cuda":
        masters, other = (max(used) for used in zip(*[[used for _, used in row] for row in rows], strict=True))
        report(f"{case}_memory_{DEVICE}", masters / other, 1.0, masters_bytes=masters, **{f"{rival}_bytes": other})
    else:
        sys.stderr.write(f"{case}: no GPU here; these figures are of a small model on the CPU.\n")
    if dist.is_initialized():
        dist.destroy_process_group()


CASES = {f"masters_over_{rival}": (1, partial(over, rival=rival)) for rival in ("amp", "fp32")}


if __name__ == "__main__":
    run(__file__, __doc__, CASES)
