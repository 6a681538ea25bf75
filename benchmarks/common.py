"""What benchmarks share: starting ranks, quiet trainers, timing, and one JSON line a row."""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

sys.path.append(str(Path(__file__).parents[1]))  # for the example's model
INSIDE = "BENCHMARK_RANK"  # set in the processes that measure


def run(script: str, about: str | None, cases: Mapping[str, tuple[int, Callable[[str], None]]]) -> None:
    """The command line of a benchmark: all cases, or the one that is named.

    Args:
        script: Its file.
        about: Its docstring.
        cases: Of each case, the number of ranks and what each rank runs.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("case", nargs="?", choices=cases, help="default: all, one after the other")
    args = parser.parse_args()
    for case in [args.case] if args.case else cases:
        size, measure = cases[case]
        if _is_rank():
            measure(case)
            if dist.is_initialized():
                dist.destroy_process_group()
        else:
            _launch(script, case, size)


def _launch(script: str, case: str, size: int) -> None:
    """Run ``python script case`` again as ``size`` ranks of one thread each; rank 0 prints the row.

    Raises:
        subprocess.CalledProcessError: If a rank fails.
    """
    environment = {**os.environ, INSIDE: "1", "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"] if size > 1 else []
    subprocess.run([sys.executable, *torchrun, script, case], env=environment, check=True)


def _is_rank() -> bool:
    """Whether this process was started by ``run``; if so, silence what is not a row."""
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
    trainer = Trainer(**{"accelerator": "cpu", "max_epochs": 1, **dict.fromkeys(bare, False), **keywords})
    trainer.fit(module, DataLoader(batches, batch_size=None))


def seconds(job: Callable[[], object]) -> float:
    """Time a job that all ranks start together."""
    if dist.is_initialized():
        dist.barrier()  # so that no rank times another's lateness
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def compare(
    case: str, rows: Sequence[Sequence[float]], target: float, names: tuple[str, str], *, at_least: bool = False
) -> None:
    """Report how long the first column takes in units of the second: the median of each round's own ratio.

    The first fifth of the rows warms up, and a row counts as its slowest rank's.
    """
    late = _slowest(rows)
    first, second = (median(column) for column in zip(*late, strict=True))
    report(case, median(a / b for a, b in late), target, at_least=at_least, **{names[0]: first, names[1]: second})


def typical(times: Sequence[float]) -> float:
    """Median over steps, likewise."""
    return median(time for (time,) in _slowest([[time] for time in times]))


def report(case: str, value: float, target: float, *, at_least: bool = False, **more: float | list[str]) -> None:
    """Print one row, on rank 0; a value is a ratio that should be at most its target, or at least."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        holds = value >= target if at_least else value <= target
        row = {"case": case, "value": round(value, 4), "target": target, "holds": holds}
        rounded = {name: n if isinstance(n, list) else round(n, 5) for name, n in more.items()}
        print(json.dumps(row | rounded), flush=True)


def _slowest(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    times = torch.tensor(rows, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
    late: list[list[float]] = times[len(times) // 5 :].tolist()
    return late


class _Nap(torch.autograd.Function):
    """Computes nothing, for a while: takes no core, so that more ranks than cores run as if each had one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, nap: float) -> Tensor:
        ctx.nap = nap
        time.sleep(nap)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.nap)
        return gradients[0], None


class SleepingBlock(nn.Module):
    """A few parameters, of which one is used, and a nap.

    Args:
        nap: Seconds that the forward sleeps; the backward sleeps twice that.
        width: Number of parameters.
    """

    def __init__(self, nap: float, width: int = 1) -> None:
        super().__init__()
        self.nap, self.scale = nap, nn.Parameter(torch.ones(width))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return _Nap.apply(x * self.scale[0], self.nap)


class StepTimes(Callback):
    """Times of whole training steps, optimizer and Lightning's own work included."""

    def __init__(self) -> None:
        self.times: list[float] = []

    @override
    def on_train_batch_start(self, *args: Any) -> None:
        dist.barrier()  # so that no rank times another's lateness
        self.start = time.perf_counter()

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        self.times.append(time.perf_counter() - self.start)
