"""What a convolutional network saves for backward, as it is and compressed: `python -m examples.compression [NAME]`."""

import logging
import sys
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader

from examples.networks import NETWORKS, Network, pictures
from lightning_hybrid.callbacks import ActivationCompression, MemoryLedger
from lightning_hybrid.functional.compressing import sum_layers

BATCH, STEPS, TESTED, WIDTH = 16, 60, 256, 14
RUNS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "lossless": {},
    "lossless, fp16": {"lossy": "fp16"},
    "lossless, fp10": {"lossy": "fp10"},
    "lossless, fp8": {"lossy": "fp8"},
}


class Outcome(NamedTuple):
    """Of one run: bytes saved in the last step, and the most at once; share of test pictures told right; the rest."""

    saved: int
    most: int
    accuracy: float
    seconds: float
    weights: dict[str, torch.Tensor]


class Steps(Callback):
    """Seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)


def accuracy(network: Network) -> float:
    """Share of pictures that it has not seen and tells right."""
    images, classes = pictures(TESTED, network.size, seed=1).tensors
    network.eval()
    with torch.no_grad():
        return float((network(images).argmax(1) == classes).float().mean())


def train(network: str, run: str, max_steps: int, folder: str) -> Outcome:
    """Train one network with the settings of a run, and draw what its layers save."""
    seed_everything(0, verbose=False)
    module, ledger, steps = NETWORKS[network](), MemoryLedger(depth=2), Steps()
    settings, picture = RUNS[run], str(Path(folder, f"{network} {run}.png".replace(", ", "-").replace(" ", "-")))
    compression = None if settings is None else ActivationCompression(**settings, picture=picture)
    callbacks = [steps, ledger, *([] if compression is None else [compression])]
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", devices=1, callbacks=callbacks, max_steps=max_steps, max_epochs=-1, **quiet)
    with redirect_stdout(StringIO()):  # the callbacks' own tables
        trainer.fit(module, DataLoader(pictures(BATCH * max_steps, module.size), BATCH))
    weights, most = {k: v.clone() for k, v in module.state_dict().items()}, ledger.last.totals()["activations"]
    saved = most if compression is None else sum_layers(compression.layers.values()).total_after
    return Outcome(saved, most, accuracy(module), median(steps.seconds), weights)


def main(network: str = "NiN", folder: str = "compression", max_steps: int = STEPS) -> dict[str, Outcome]:
    """Train a network once in each way, and print a row of a table for each."""
    if network not in NETWORKS:
        raise SystemExit(f"{network!r} is none of {', '.join(NETWORKS)}.")
    columns = ("compression", "KiB saved", "smaller", "most at once", "accuracy", "time of a step", "same bits")
    print(f"{network}, {max_steps} steps of {BATCH} pictures: what the last one saves for backward", flush=True)
    print(*(f"{column:>{WIDTH}}" for column in columns))
    outcomes: dict[str, Outcome] = {}
    for run in RUNS:
        found = outcomes[run] = train(network, run, max_steps, folder)
        plain = outcomes["plain"]
        same = all(torch.equal(plain.weights[key], weight) for key, weight in found.weights.items())
        numbers = f"{found.saved / 1024:,.0f}", f"{plain.saved / found.saved:.2f} x", f"{found.most / 1024:,.0f}"
        row = (
            run,
            *numbers,
            f"{found.accuracy:.1%}",
            f"{found.seconds / plain.seconds:.2f} x",
            "yes" if same else "no",
        )
        print(*(f"{cell:>{WIDTH}}" for cell in row), flush=True)
    print(f"Pictures of what layers save are in the folder {folder}/. Times are rough on a busy machine.")
    return outcomes


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    main(*sys.argv[1:3])
