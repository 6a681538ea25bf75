"""What a GPT holds with each way to hold less, and how long a step takes: `python -m examples.memory [FOLDER]`."""

import sys
import time
from collections.abc import Iterable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from examples.gpt import GPT, Windows, library_files, read, split
from lightning_hybrid.callbacks import ActivationOffload, ActivationRecompute, MemoryLedger, ParameterOffload

BATCH, CONTEXT = 8, 64
RUNS = {
    "plain": [],
    "recompute full": [ActivationRecompute()],
    "recompute sqrt": [ActivationRecompute("sqrt")],
    "recompute selective": [ActivationRecompute("selective")],
    "recompute within 8 MiB": [ActivationRecompute(budget_bytes=2**23)],
    "offload": [ActivationOffload(min_bytes=2**16)],
    "recompute full, offload": [ActivationRecompute(), ActivationOffload(min_bytes=2**16)],
    "stream parameters": [ParameterOffload()],
    "all three": [ActivationRecompute(), ActivationOffload(min_bytes=2**16), ParameterOffload()],
}


class Outcome(NamedTuple):
    """Of one run: bytes at their peak in its last step, parameters on the device, seconds of a step, and weights."""

    saved: int
    recomputed: int
    on_host: int
    parameters: int
    seconds: float
    weights: dict[str, torch.Tensor]


class Steps(Callback):
    """Seconds of each step, and bytes of parameters on the device."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.parameters = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        streams = [callback.streaming for callback in trainer.callbacks if isinstance(callback, ParameterOffload)]
        whole = sum(parameter.nbytes for parameter in pl_module.parameters())
        self.parameters = streams[0].device_bytes if streams and streams[0] is not None else whole


def train(name: str, max_steps: int, folder: str) -> Outcome:
    """Train with some callbacks, and draw a step."""
    seed_everything(0, verbose=False)
    ledger, steps, module = MemoryLedger(picture=str(Path(folder, f"{name}.png"))), Steps(), GPT(context=CONTEXT)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    data = DataLoader(Windows(read(split(library_files())[1]), CONTEXT), BATCH)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[steps, *RUNS[name], ledger],
        max_steps=max_steps,
        limit_val_batches=0,
        **quiet,
    )
    with redirect_stdout(StringIO()):  # the ledger's and the plans' own tables
        trainer.fit(module, data, data)
    totals = ledger.last.totals()
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    saved = (totals[kind] for kind in ("activations", "recomputed", "offloaded"))
    return Outcome(*saved, steps.parameters, median(steps.seconds[3:] or steps.seconds), weights)


def main(folder: str = "memory", max_steps: int = 8, names: Iterable[str] = RUNS) -> dict[str, Outcome]:
    """Train plainly and with some of `RUNS`, and print a table."""
    outcomes = {name: train(name, max_steps, folder) for name in dict.fromkeys(("plain", *names))}
    plain = outcomes["plain"]
    table = Table(title=f"A GPT of 8 blocks, batches of {BATCH} x {CONTEXT} bytes: KiB at the peak of a step")
    columns = ("callbacks", "saved", "recomputed", "in host memory", "parameters", "time of a step", "same bits")
    for column in columns:
        table.add_column(column, justify="left" if column == "callbacks" else "right")
    for name, outcome in outcomes.items():
        same = all(torch.equal(plain.weights[key], weight) for key, weight in outcome.weights.items())
        kib = (f"{number / 1024:,.0f}" for number in outcome[:4])
        table.add_row(name, *kib, f"{outcome.seconds / plain.seconds:.2f} x", "yes" if same else "NO")
    console = Console()
    console.print(table) if console.is_terminal else Console(width=120).print(table)
    console.print(f"Pictures of a step of each are in the folder {folder}/. Times are rough on a busy machine.")
    return outcomes


if __name__ == "__main__":
    main(*sys.argv[1:2])
