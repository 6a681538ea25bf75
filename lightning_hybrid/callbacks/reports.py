"""What ledgers share: when and how they log, and how a table is shown."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from rich.console import Console
from rich.table import Table

from lightning_hybrid.parallel.ledgers.traffic import over_ranks

WIDTH_OF_FILES = 160


def is_logging_step(trainer: Trainer) -> bool:
    """Whether the step that has just ended is one of every `log_every_n_steps`."""
    interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return interval > 0 and trainer.global_step % interval == 0


def log_bytes(pl_module: LightningModule, name: str, num_bytes: float) -> None:
    """Log a number of bytes, exactly: float32 would round above 16 MiB."""
    pl_module.log(name, torch.tensor(num_bytes, dtype=torch.float64), batch_size=1)


def fail_together(error: str) -> None:
    """Raise what any rank has to say, on all of them; they call it together, with "" if all is well.

    Raises:
        ValueError: With each error once, and the ranks that have it.
    """
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(over_ranks(error)):
        ranks.setdefault(text, []).append(rank)
    ranks.pop("", None)
    if ranks:
        of_rank = ((f"Rank{'s' * (len(some) > 1)} {', '.join(map(str, some))}", text) for text, some in ranks.items())
        raise ValueError(" ".join(f"{who}: {text}" for who, text in of_rank))


def show(trainer: Trainer, *tables: Table) -> None:
    """Print tables on rank 0; in a file, which has no width, no column is cut."""
    if trainer.is_global_zero:
        console = Console()
        for table in tables:
            console.print(table) if console.is_terminal else Console(width=WIDTH_OF_FILES).print(table)
