"""What benchmarks share: starting ranks, quiet trainers, timing, and one JSON line a row."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).parents[1]))  # for the example's model
INSIDE = "BENCHMARK_RANK"  # set in the processes that measure


def launch(script: str, case: str, size: int) -> None:
    """Run ``python script case`` again as ``size`` ranks of one thread each; rank 0 prints the row.

    Raises:
        subprocess.CalledProcessError: If a rank fails.
    """
    environment = {**os.environ, INSIDE: "1", "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"] if size > 1 else []
    subprocess.run([sys.executable, *torchrun, script, case], env=environment, check=True)


def is_rank() -> bool:
    """Whether this process was started by ``launch``; if so, silence what is not a row."""
    if INSIDE not in os.environ:
        return False
    torch.set_num_threads(1)
    for package in ("pytorch", "fabric"):
        logging.getLogger(f"lightning.{package}").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\.|torch\.distributed\.")  # advice for real trainings
    return True


def fit(module: LightningModule, batches: Sequence[Any], **keywords: Any) -> None:
    """Train on each batch once, with nothing around the steps that a user could turn off."""
    bare = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(accelerator="cpu", max_epochs=1, **dict.fromkeys(bare, False), **keywords)
    trainer.fit(module, DataLoader(batches, batch_size=None))


def seconds(job: Callable[[], object]) -> float:
    """Time a job that all ranks start together."""
    dist.barrier()  # so that no rank times another's lateness
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def medians(rows: Iterable[Sequence[float]]) -> list[float]:
    """Median of each column without the first fifth of the rows, which warms up; a row counts as its slowest rank's."""
    times = torch.tensor(list(rows), dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return [median(column) for column in times[len(times) // 5 :].T.tolist()]


def report(case: str, value: float, target: float, **more: float) -> None:
    """Print one row, on rank 0; values are ratios that should be at most the target."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        rounded = {name: round(number, 5) for name, number in more.items()}
        print(json.dumps({"case": case, "value": round(value, 4), "target": target, "holds": value <= target, **rounded}), flush=True)
