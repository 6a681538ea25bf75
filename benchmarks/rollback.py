"""What `DivergenceRollback` adds to a step of the example's GPT, and what a snapshot takes.

``python benchmarks/rollback.py`` runs all cases, ``python benchmarks/rollback.py CASE`` one of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from callbacks import ACCUMULATE, BATCH, CONTEXT, NUM_ROUNDS, step_seconds
from common import fit, report, run
from lightning.pytorch import Callback, seed_everything
from torch import Tensor
from typing_extensions import override

from examples.gpt import GPT
from lightning_hybrid.callbacks import DivergenceRollback
from lightning_hybrid.callbacks.run_snapshot import HostCopies, RunSnapshot

EVERY = 100  # steps from one snapshot to the next
DETECTORS: dict[str, Literal["nan", "spike"]] = {"nan": "nan", "spike": "spike"}


class Snapshots(Callback):
    """Takes a snapshot before each step, as one in the middle of a run, in memory of the one before, and goes back."""

    def __init__(self) -> None:
        self.taking: list[float] = []
        self.returning: list[float] = []
        self.num_bytes = self.num_model_bytes = 0

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.copies = HostCopies()
        if batch_idx % ACCUMULATE == 0:
            start = time.process_time()
            snapshot = RunSnapshot(trainer, pl_module, self.copies, None)
            self.taking.append(time.process_time() - start)
            start = time.process_time()
            snapshot.put_back()
            self.returning.append(time.process_time() - start)
            self.num_bytes = snapshot.num_bytes
            states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
            self.num_model_bytes = sum(tensor.nbytes for tensor in [*pl_module.parameters(), *states])
            snapshot.drop()


def snapshots() -> Snapshots:
    """Of a short fit."""
    seed_everything(0, verbose=False)
    batches: list[Tensor] = [torch.randint(256, (BATCH, CONTEXT + 1)) for _ in range(ACCUMULATE * 10)]
    found = Snapshots()
    with redirect_stdout(StringIO()):
        fit(GPT(context=CONTEXT), batches, callbacks=[found], accumulate_grad_batches=ACCUMULATE)
    return found


def overhead(case: str) -> None:
    """Times of steps with the callback, a hundredth of a snapshot included, over those of steps without."""
    taking = median(snapshots().taking[2:])
    ratios, plain = [], []
    with TemporaryDirectory() as folder:
        options: dict[str, Any] = {"snapshot_every": EVERY, "window": 4, "audit": f"{folder}/audit.csv"}

        def make() -> list[Callback]:
            return [DivergenceRollback(DETECTORS[case], **options)]

        for i in range(NUM_ROUNDS):
            order: list[Callable[[], list[Callback]]] = [list, make]
            found = {job is make: step_seconds(job) for job in order[:: 1 if i % 2 else -1]}
            ratios.append((found[True] + taking / EVERY) / found[False])
            plain.append(found[False])
    report(case, median(ratios), 1.02, plain_s=median(plain), snapshot_s=taking)


def memory(case: str) -> None:
    """Host memory of a snapshot over that of parameters and optimizer states."""
    found = snapshots()
    report(case, found.num_bytes / found.num_model_bytes, 1.0, num_bytes=found.num_bytes)


def return_time(case: str) -> None:
    """Seconds of going back, over those of a step."""
    found, plain = snapshots(), step_seconds(list)
    report(case, median(found.returning[2:]) / plain, 1.0, return_s=median(found.returning[2:]), plain_s=plain)


CASES: dict[str, tuple[int, Callable[[str], None]]] = {
    **dict.fromkeys(DETECTORS, (1, overhead)),
    "memory": (1, memory),
    "return": (1, return_time),
}


if __name__ == "__main__":
    run(__file__, __doc__, CASES)
