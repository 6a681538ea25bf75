"""Sharded checkpoints of a GPT on two ranks beside `torch.save` and `torch.load` of the same bytes on the same disk.

``python benchmarks/checkpoint.py`` runs all cases, ``python benchmarks/checkpoint.py CASE`` one of them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import compare, fit, run, seconds
from lightning.pytorch import Callback, seed_everything
from typing_extensions import override

from examples.gpt import GPT
from lightning_hybrid import HybridPTDPStrategy
from lightning_hybrid.parallel.checkpoint.reading import FolderReader
from lightning_hybrid.parallel.checkpoint.states import model_parts, optimizer_parts

NUM_RANKS, ROUNDS = 2, 10
BATCHES = list(torch.randint(256, (ROUNDS + 1, 2, 33), generator=torch.Generator().manual_seed(0)))


class Bandwidths(Callback):
    """After each batch: save and load in both ways, and save in the background.

    Args:
        folder: Where to write; the same on all ranks.

    Attributes:
        saves: (rival, ours) seconds of each round; likewise `loads`, and `pauses` (background, at once).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.saves: list[tuple[float, float]] = []
        self.loads: list[tuple[float, float]] = []
        self.pauses: list[tuple[float, float]] = []

    @override
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        strategy = trainer.strategy
        model, optimizer = strategy.lightning_module_state_dict(), strategy.optimizer_state(trainer.optimizers[0])
        rival, ours = self.folder / "rival.pt", self.folder / "ours.ckpt"
        strategy.checkpoints.in_background = False
        at_once = seconds(lambda: trainer.save_checkpoint(ours))
        self.saves.append((seconds(first(lambda: save({"model": model, "optimizer": optimizer}, rival))), at_once))
        self.loads.append((seconds(first(lambda: torch.load(rival))), seconds(lambda: read(trainer, ours))))
        strategy.checkpoints.in_background = True
        self.pauses.append((seconds(lambda: trainer.save_checkpoint(ours)), at_once))
        strategy.checkpoints.wait()


def first(job: Callable[[], object]) -> Callable[[], None]:
    """A job of rank 0, on which the others wait."""

    def both() -> None:
        if dist.get_rank() == 0:
            job()
        dist.barrier()

    return both


def save(state: Any, path: Path) -> None:
    """Write a file and wait until it is on the disk, as the folder is waited for."""
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def read(trainer: Any, path: Path) -> None:
    """Read what this rank has of the model and the optimizer."""
    assembly = trainer.strategy.assembly
    parts, _ = model_parts(assembly.engine, assembly.outline)
    more, _ = optimizer_parts(assembly.engine, trainer.optimizers[0], 0, assembly.outline)
    tensors = {**parts, **more}
    fresh = {name: part.like() for name, part in tensors.items()}
    FolderReader(path).read(fresh)
    dist.barrier()


def measure(case: str) -> None:
    """Train, save and load in turn, and report one case."""
    seed_everything(0)
    folder = Path(os.environ.get("BENCHMARK_FOLDER", tempfile.gettempdir())) / "lightning_hybrid_checkpoints"
    folder.mkdir(exist_ok=True)
    found = Bandwidths(folder)
    strategy = HybridPTDPStrategy(pipeline_parallel_size=1, zero_stage=2, state_dict_type="sharded", async_save=True)
    fit(GPT(512, depth=4, heads=8), BATCHES, strategy=strategy, devices=NUM_RANKS, callbacks=[found])
    shutil.rmtree(folder, ignore_errors=True)
    if case == "save":
        compare(case, found.saves, 1.0, ("torch_seconds", "sharded_seconds"), at_least=True)
    elif case == "load":
        compare(case, found.loads, 1.0, ("torch_seconds", "sharded_seconds"), at_least=True)
    else:
        compare(case, found.pauses, 0.3, ("async_seconds", "sync_seconds"))


CASES = dict.fromkeys(("save", "load", "pause"), (NUM_RANKS, measure))

if __name__ == "__main__":
    run(__file__, __doc__, CASES)
