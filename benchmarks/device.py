"""On one device: float16 over float32 masters against torch's AMP and float32, and what callbacks hold less of memory.

``python benchmarks/device.py`` runs all cases, ``python benchmarks/device.py CASE`` one of them. The figures are about
a GPU; without one it trains a small model on the CPU, which shows that the cases run, and leaves memory out. On a GPU
compression's cases are there too, with networks as wide as published, and those of optimizers, with GPT-2's parameters.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from statistics import median
from typing import Any

import activation_compression as compression
import optimizers
import torch
import torch.distributed as dist
from common import compare, report, run
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader
from typing_extensions import override

from examples.gpt import GPT
from lightning_hybrid import HybridPTDPStrategy
from lightning_hybrid.callbacks import ActivationOffload, ActivationRecompute, ParameterOffload
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
    callbacks = [steps, *options.pop("callbacks", [])]
    Trainer(max_epochs=1, callbacks=callbacks, **dict.fromkeys(bare, False), **options).fit(model, batches)
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


LESS: dict[str, Callable[[], list[Callback]]] = {
    "recompute_full": lambda: [ActivationRecompute()],
    "recompute_sqrt": lambda: [ActivationRecompute("sqrt")],
    "recompute_selective": lambda: [ActivationRecompute("selective")],
    "offload": lambda: [ActivationOffload()],
    "stream": lambda: [ParameterOffload()],
    "all_three": lambda: [ActivationRecompute(), ActivationOffload(), ParameterOffload()],
}
SLOWDOWN = 1.34  # one forward more is a third of a step
MEMORY_ROUNDS = 2


def bandwidth(num_bytes: int = 2**28) -> float:
    """Bytes a second from the device to pinned memory and back, alone."""
    there, here = torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE), torch.empty(num_bytes, dtype=torch.uint8)
    here = here.pin_memory() if DEVICE == "cuda" else here
    times = []
    for _ in range(5):
        _wait()
        start = time.perf_counter()
        here.copy_(there, non_blocking=True)
        there.copy_(here, non_blocking=True)
        _wait()
        times.append(time.perf_counter() - start)
    return 2 * num_bytes / median(times)


def hidden(callbacks: list[Callback], extra_seconds: float) -> dict[str, float]:
    """Share of copies that computation hid: of seconds that they take alone, or of copies that nobody waited for."""
    found = {}
    for callback in callbacks:
        if isinstance(callback, ParameterOffload):
            found["parameters_hidden"] = 1 - callback.counts.waits / max(1, callback.counts.fetches)
        if isinstance(callback, ActivationOffload) and len(callbacks) == 1 and callback.sizes:
            alone = 2 * sum(callback.sizes.values()) / bandwidth()
            found["activations_hidden"] = 1 - min(1.0, max(0.0, extra_seconds) / alone)
    return found


def less(case: str, name: str) -> None:
    """A step with callbacks over a plain one, its most memory, and the share of copies that computation hid."""
    rows, callbacks = [], list[Callback]()
    for _ in range(MEMORY_ROUNDS):
        callbacks = LESS[name]()
        with redirect_stdout(StringIO()):  # plans
            rows.append([train({"callbacks": callbacks}), train({})])
    own, plain = (min(seconds) for seconds in zip(*[[s for s, _ in row] for row in rows], strict=True))
    shares = hidden(callbacks, own - plain)
    report(f"{case}_time_{DEVICE}", own / plain, SLOWDOWN, own_s=own, plain_s=plain, **shares)
    if DEVICE == "cuda":
        held, whole = (max(used) for used in zip(*[[used for _, used in row] for row in rows], strict=True))
        report(f"{case}_memory_{DEVICE}", held / whole, 1.0, own_bytes=held, plain_bytes=whole)


CASES = {
    **{f"masters_over_{rival}": (1, partial(over, rival=rival)) for rival in ("amp", "fp32")},
    **{name: (1, partial(less, name=name)) for name in LESS},
    # without a GPU they are those of the other files
    **({f"compression_{name}": case for name, case in compression.CASES.items()} if DEVICE == "cuda" else {}),
    **({f"optimizers_{name}": case for name, case in optimizers.CASES.items()} if DEVICE == "cuda" else {}),
}


if __name__ == "__main__":
    run(__file__, __doc__, CASES)
