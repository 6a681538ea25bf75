"""Sharded checkpoints of a GPT on two ranks beside `torch.save` and `torch.load` of the same bytes on the same disk.

``python benchmarks/checkpoint.py`` runs all cases, ``python benchmarks/checkpoint.py CASE`` one of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import compare, fit, report, run, seconds
from lightning.pytorch import Callback, seed_everything
from typing_extensions import override

from examples.gpt import GPT
from lightning_hybrid import HybridPTDPStrategy
from lightning_hybrid.parallel.checkpoint.entries import Manifest
from lightning_hybrid.parallel.checkpoint.parts import Part, Piece, part_of
from lightning_hybrid.parallel.checkpoint.reading import FolderReader
from lightning_hybrid.parallel.checkpoint.sharded import save_sharded
from lightning_hybrid.parallel.checkpoint.states import model_parts, optimizer_parts

NUM_RANKS, ROUNDS = 2, 20
ROWS = 2**22  # of four float32 each, 64 MiB
BATCHES = list(torch.randint(256, (ROUNDS + 1, 2, 33), generator=torch.Generator().manual_seed(0)))


class Bandwidths(Callback):
    """After each batch: save and load in both ways, and save in the background.

    Args:
        folder: Where to write; the same on all ranks.

    Attributes:
        saves: (rival, ours) seconds of each round; likewise `files`, of one file, and `loads`; `pauses` (background, at
            once).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.saves: list[tuple[float, float]] = []
        self.files: list[tuple[float, float]] = []
        self.loads: list[tuple[float, float]] = []
        self.pauses: list[tuple[float, float]] = []

    @override
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        strategy = trainer.strategy
        model, optimizer = strategy.lightning_module_state_dict(), strategy.optimizer_state(trainer.optimizers[0])
        rival, ours, file = (self.folder / name for name in ("rival.pt", "ours.ckpt", "file.ckpt"))
        strategy.checkpoints.in_background = False
        at_once = seconds(lambda: trainer.save_checkpoint(ours))
        theirs = seconds(first(lambda: save({"model": model, "optimizer": optimizer}, rival)))
        self.saves.append((theirs, at_once))
        strategy.options["state_dict_type"] = "full"
        self.files.append((theirs, seconds(lambda: trainer.save_checkpoint(file))))
        strategy.options["state_dict_type"] = "sharded"
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


def like(part: Part) -> Part:
    """The same boxes in new memory."""
    return replace(part, pieces=tuple(Piece(piece.box, torch.empty_like(piece.data)) for piece in part.pieces))


def read(trainer: Any, path: Path) -> None:
    """Read what this rank has of the model and the optimizer."""
    assembly = trainer.strategy.assembly
    parts, _ = model_parts(assembly.engine, assembly.outline)
    more, _ = optimizer_parts(assembly.engine, trainer.optimizers[0], 0, assembly.outline)
    tensors = {**parts, **more}
    fresh = {name: like(part) for name, part in tensors.items()}
    FolderReader(path).read(fresh)
    dist.barrier()


def measure(case: str) -> None:
    """Train, save and load in turn, and report one case."""
    seed_everything(0)
    folder = Path(os.environ.get("BENCHMARK_FOLDER", tempfile.gettempdir())) / "lightning_hybrid_checkpoints"
    folder.mkdir(exist_ok=True)
    found = Bandwidths(folder)
    strategy = HybridPTDPStrategy(pipeline_parallel_size=1, zero_stage=2, state_dict_type="sharded", async_save=True)
    fit(GPT(768, depth=6, heads=12), BATCHES, strategy=strategy, devices=NUM_RANKS, callbacks=[found])
    shutil.rmtree(folder, ignore_errors=True)
    if case == "save":
        compare(case, found.saves, 1.0, ("torch_seconds", "sharded_seconds"), at_least=True)
    elif case == "save_file":
        compare(case, found.files, 1.0, ("torch_seconds", "streamed_seconds"), at_least=True)
    elif case == "load":
        compare(case, found.loads, 1.0, ("torch_seconds", "sharded_seconds"), at_least=True)
    else:
        compare(case, found.pauses, 0.3, ("async_seconds", "sync_seconds"))


EXPORT = """
import re, sys
from pathlib import Path
from lightning_hybrid.cli.checkpoint import main
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
main(["export", sys.argv[1], sys.argv[1].replace(".ckpt", "-out.ckpt")])  # loads code
before = peak()
main(["export", sys.argv[2], sys.argv[2].replace(".ckpt", "-out.ckpt")])
print(peak() - before)
"""


def measure_export(case: str) -> None:
    """Growth of a process that makes one file of eight tensors, in units of twice the largest and 64 MiB."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder) / "small.ckpt", Path(folder) / "large.ckpt"
        for path, number, rows in ((small, 1, 1), (large, 8, ROWS)):
            parts = {f"model.{n}": part_of(torch.full((rows, 4), float(n))) for n in range(number)}
            save_sharded(path, parts, {"state_dict": {}}, Manifest("", {}))
        command = [sys.executable, "-c", EXPORT, str(small), str(large)]
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back at once
        root = Path(__file__).parents[1]
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root, env=environment)
    growth, largest = int(done.stdout.split()[-1]), ROWS * 16
    report(case, growth / (2 * largest + 2**26), 1.0, growth_mib=growth / 2**20, largest_mib=largest / 2**20)


CASES: dict[str, tuple[int, Callable[[str], None]]] = {
    **dict.fromkeys(("save", "save_file", "load", "pause"), (NUM_RANKS, measure)),
    "export": (1, measure_export),
}

if __name__ == "__main__":
    run(__file__, __doc__, CASES)
