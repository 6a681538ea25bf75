"""A file with a line for each time that a run has gone back, and the same lines for the console and an error."""

from __future__ import annotations

import csv
import os
from datetime import datetime, timezone
from typing import Any

from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

COLUMNS = (
    "time",
    "retry",
    "epoch",
    "step",
    "batches",
    "back_to_step",
    "reason",
    "loss",
    "gradient_norm",
    "module",
    "batch",
    "micro_batch",
    "rank",
    "action",
)
SHOWN = 5  # lines of an error


class RollbackAudit:
    """Lines of CSV, which a run that goes on adds to.

    Args:
        path: Of the file; it and its folder are made with the first line, by global rank 0.

    Attributes:
        path: As given.
        rows: Lines of this process.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []

    def add(self, trainer: Trainer, **values: Any) -> None:
        """Add a line, and say it; every rank calls it.

        Args:
            trainer: Knows which rank writes.
            values: By column; None leaves one empty.
        """
        row = dict.fromkeys(COLUMNS, "") | {name: value for name, value in values.items() if value is not None}
        row["time"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.rows.append(row)
        if not trainer.is_global_zero:
            return
        os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
        is_new = not os.path.exists(self.path) or os.path.getsize(self.path) == 0
        with open(self.path, "a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if is_new:
                writer.writeheader()
            writer.writerow(row)
        back = "" if row["back_to_step"] == "" else f"; back to step {row['back_to_step']}"
        rank_zero_info(f"DivergenceRollback: {_line(row)}{back}")

    def used_up(self, retries: int, most: int, steps: int) -> str:
        """What a run says that cannot go back any more."""
        if retries <= most:
            return (
                "The run has diverged, and there is no snapshot to go back to: it was resumed within an accumulation "
                f"window, whose end is the first step. Resume from an older checkpoint.\n{self._history()}"
            )
        return (
            f"The run has diverged {retries} times, each less than {steps} steps after the one before, and "
            f"max_retries={most}. Leave out more (skip_batches), lower the learning rate (on_retry='lower_lr'), look "
            "at the data and the module that is named, or give a larger max_retries. "
            f"{self.path} has all of it.\n{self._history()}"
        )

    def _history(self) -> str:
        lines = [f"  {_line(row)}" for row in self.rows[-SHOWN:]]
        more = len(self.rows) - len(lines)
        return "\n".join([*([f"  {more} before"] if more else []), *lines])


def _line(row: dict[str, Any]) -> str:
    return (
        f"step {row['step']}, batches {row['batches']} of epoch {row['epoch']}: {row['reason']}"
        + (f", first in {row['module']}" if row["module"] else "")
        + (f" on rank {row['rank']}" if row["rank"] != "" else "")
        + f" ({row['action']})"
    )
