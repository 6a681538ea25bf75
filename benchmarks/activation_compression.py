"""Bytes that five convolutional networks hold for backward with and without compression, and times of their steps.

``python benchmarks/activation_compression.py`` runs all cases, ``python benchmarks/activation_compression.py CASE`` one
of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from copy import deepcopy
from functools import partial
from io import StringIO
from statistics import mean, median
from typing import Any

import torch
from common import fit, report, run
from lightning.pytorch import Callback, seed_everything
from torch import Tensor
from typing_extensions import override

from examples.networks import NETWORKS, Network, pictures
from lightning_hybrid.callbacks import ActivationCompression, MemoryLedger
from lightning_hybrid.functional.compressing import sum_layers
from lightning_hybrid.parallel.memory.encoding import LOSSY, Lossy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OF_THE_PAPER = ("AlexNet", "NiN", "OverFeat", "VGG16", "Inception")
SHRINK, SIZES, BATCH = (1, {"size": 224}, 64) if DEVICE == "cuda" else (8, {}, 32)
NUM_STEPS, NUM_TIMED = 100, 50
LOSSLESS, AVERAGE, BEST, TIME = 1.3, 1.8, 2.0, 1.04  # targets

Batch = tuple[Tensor, ...]


def batches_of(network: Network, number: int, seed: int) -> list[Batch]:
    """Batches with storages of their own."""
    return [pictures(BATCH, network.size, seed + step).tensors for step in range(number)]


def train(network: Network, batches: Sequence[Batch], *callbacks: Callback) -> None:
    """Train on each batch once, without the tables that callbacks print."""
    accelerator = "gpu" if DEVICE == "cuda" else "cpu"
    with redirect_stdout(StringIO()):
        fit(network, batches, accelerator=accelerator, devices=1, callbacks=list(callbacks))


def trained(name: str) -> Network:
    """A network that has learned to tell pictures apart, so that its activations are as sparse as they come to be."""
    seed_everything(0, verbose=False)
    network = NETWORKS[name](SHRINK, **SIZES)
    train(network, batches_of(network, NUM_STEPS, seed=1))
    return network


def held(network: Network, *callbacks: Callback) -> float:
    """Most bytes of saved activations in a step of a copy."""
    ledger = MemoryLedger()
    train(deepcopy(network), batches_of(network, 2, seed=1000), *callbacks, ledger)
    return float(sum(ledger.last.activations.values()))


def saved(case: str) -> None:
    """Bytes without compression over those with it: of each network, and over networks."""
    ratios: dict[Lossy | None, list[float]] = {lossy: [] for lossy in (None, *LOSSY)}
    for name in OF_THE_PAPER:
        network, stored = trained(name), dict[str, float]()
        plain = held(network)
        for lossy, of_networks in ratios.items():
            compression = ActivationCompression(lossy=lossy)
            of_networks.append(plain / held(network, compression))
            layers = sum_layers(compression.layers.values())
            stored[f"stored_{lossy or 'lossless'}"] = layers.before / layers.total_after
        lossless, *others = (of_networks[-1] for of_networks in ratios.values())
        peaks = dict(zip(LOSSY, others, strict=True))
        report(f"{case}_{name}", lossless, LOSSLESS, at_least=True, **peaks, **stored, plain_bytes=plain)
    for lossy in LOSSY:
        report(f"{case}_average_{lossy}", mean(ratios[lossy]), AVERAGE, at_least=True)
        report(f"{case}_best_{lossy}", max(ratios[lossy]), BEST, at_least=True)


class EveryOther(ActivationCompression):
    """Compresses every other step, and times all: `seconds` of steps with and without."""

    def __init__(self, lossy: Lossy | None) -> None:
        super().__init__(lossy=lossy)
        self.seconds: tuple[list[float], list[float]] = ([], [])

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._began = _now()
        if batch_idx % 2:
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.seconds[batch_idx % 2].append(_now() - self._began)


def _now() -> float:
    """On a CPU seconds of the processor: of one thread that never waits, and of nobody else on the machine."""
    if DEVICE == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def timed(case: str, lossy: Lossy | None) -> None:
    """A step with compression over the one before it without."""
    for name in OF_THE_PAPER:
        seed_everything(0, verbose=False)
        network, steps = NETWORKS[name](SHRINK, **SIZES), EveryOther(lossy)
        train(network, batches_of(network, 2 * NUM_TIMED, seed=1), steps)
        plain, compressed = (times[NUM_TIMED // 2 :] for times in steps.seconds)  # sparser then
        ratio = median(one / other for one, other in zip(compressed, plain, strict=True))
        report(f"{case}_{name}", ratio, TIME, plain_s=median(plain), compressed_s=median(compressed))


CASES = {
    "saved": (1, saved),
    "time_lossless": (1, partial(timed, lossy=None)),
    **{f"time_{lossy}": (1, partial(timed, lossy=lossy)) for lossy in LOSSY},
}


if __name__ == "__main__":
    run(__file__, __doc__, CASES)
