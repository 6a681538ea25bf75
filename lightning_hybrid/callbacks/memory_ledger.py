"""Bytes of parameters, gradients, optimizer states and saved activations, by module."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from rich.table import Table
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hybrid.callbacks.pictures import Picture, picture_path, write_picture
from lightning_hybrid.callbacks.reports import is_logging_step, log_bytes, show
from lightning_hybrid.functional.memory import sum_by_module
from lightning_hybrid.functional.memory_drawing import memory_png
from lightning_hybrid.functional.timeline import ELSEWHERE, OUTSIDE, Timeline
from lightning_hybrid.parallel.ledgers.memory import Memory, MemoryMeter
from lightning_hybrid.parallel.ledgers.traffic import over_ranks

FILE = "memory.png"
RECORDED_STEP = 3


class MemoryLedger(Callback):
    """Counts the bytes that training keeps on this rank, with any strategy but DeepSpeed's.

    Of each category the ledger keeps the breakdown by module at the moment when its total was largest; categories peak
    at different moments. Storages are counted once, and of a DTensor the local part. Whole copies that `fully_shard`
    gathers for a while are not counted as parameters. Every `log_every_n_steps` steps the last step's totals on the
    fullest rank are logged, equal on every rank, as `memory/CATEGORY_bytes`. At the end of `fit` rank 0 prints a table
    of its modules, and one of all ranks.

    As a context manager it needs the module, and measures the block as one step: `with MemoryLedger(module=net,
    optimizers=[optimizer]) as ledger:`.

    Args:
        depth: Parts of the dotted names of modules that are kept apart; None for all.
        module: For use as a context manager.
        optimizers: For use as a context manager.
        picture: Where to draw how bytes come and go in a step: a path, which ends in ".png" or is a folder; True for
            `memory.png` in the logger's folder, or without a logger in `default_root_dir` (as a context manager, in the
            current folder); False for none. It is the third step, since the first ones allocate for good, or the
            last one of a shorter run, on rank 0. `fit` draws at its end, and after an exception what there is of it:
            the step under way, if none had ended.

    Attributes:
        last: Memory of the last finished step on this rank.
        peak: The largest of all steps, for each category.
        ranks: After `fit`, totals of `peak` of each rank, the same on every rank.
        timeline: With a picture, what was written down of that step on this rank.
    """

    def __init__(
        self,
        depth: int | None = None,
        module: nn.Module | None = None,
        optimizers: Iterable[Optimizer] = (),
        picture: Picture = False,
    ) -> None:
        if depth is not None and depth < 0:
            raise ValueError(f"depth={depth}: give the number of parts of module names to keep, 0 or more, or None.")
        self.depth, self._module, self._optimizers = depth, module, list(optimizers)
        self.last, self.peak, self.ranks = Memory(), Memory(), list[dict[str, int]]()
        picture_path(picture, FILE)
        self.picture, self._path = picture, ""
        self.timeline: Timeline | None = None
        self._meter: MemoryMeter | None = None
        self._global_step, self._is_new_step, self._num_steps = 0, True, 0

    def __enter__(self) -> MemoryLedger:
        if self._module is None:
            raise ValueError("As a context manager, the ledger must be told what to measure: MemoryLedger(module=...).")
        self._path = picture_path(self.picture, FILE)
        self._begin(self._module)
        self._enter()
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._meter is not None
        self._finish_step(self._meter, self._optimizers)
        self._close(draws=True)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        ledgers = sum(isinstance(callback, MemoryLedger) for callback in callbacks)
        if ledgers > 1:
            raise ValueError(f"The Trainer has {ledgers} MemoryLedgers, and one can count at a time. Keep one.")
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise ValueError(
                f"MemoryLedger cannot count under {type(trainer.strategy).__name__}: DeepSpeed keeps gradients, states "
                "and in stage 3 parameters in flat buffers of its own. Remove it; CommunicationLedger works there."
            )

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._path = picture_path(self.picture, FILE, trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(pl_module)
        self._global_step = trainer.global_step

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._enter()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        assert self._meter is not None
        self._meter.optimizer_steps()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._meter is not None
        self._meter.__exit__()
        if trainer.global_step == self._global_step:
            return  # within an accumulation window
        self._global_step = trainer.global_step
        self._finish_step(self._meter, trainer.optimizers)
        if is_logging_step(trainer):
            totals = over_ranks(self.last.totals())
            for name in totals[0]:
                log_bytes(pl_module, f"memory/{name}_bytes", max(of_rank[name] for of_rank in totals))

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._meter is not None
        self._meter.__exit__()  # a hook may have skipped the rest of the epoch in the middle of a batch

    def leave_batch(self, trainer: Trainer) -> None:
        """See `callback_states.leave_batch`; what the batch took counts in the step that comes."""
        assert self._meter is not None
        self._meter.__exit__()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close(draws=trainer.is_global_zero)
        self.ranks = over_ranks(self.peak.totals())
        show(trainer, self.table(), *([self.table_of_ranks()] if len(self.ranks) > 1 else []))

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close(draws=trainer.is_global_zero)

    def table(self) -> Table:
        """The peak of each category on this rank, by module."""
        names = _columns([self.peak.totals()])
        sums = [sum_by_module(getattr(self.peak, name), self.depth) for name in names]
        modules = dict.fromkeys(module for column in sums for module in column)
        rows = {module or OUTSIDE: [column.get(module, 0) for column in sums] for module in sorted(modules)}
        return _table("Memory of this rank, bytes at the peak of each category", "module", names, rows, total=True)

    def table_of_ranks(self) -> Table:
        """The peaks of all ranks."""
        names = _columns(self.ranks)
        rows = {str(rank): [totals[name] for name in names] for rank, totals in enumerate(self.ranks)}
        return _table("Memory of all ranks, bytes at the peak of each category", "rank", names, rows, total=False)

    def _begin(self, module: nn.Module) -> None:
        self._close()
        self.last, self.peak, self.ranks, self.timeline = Memory(), Memory(), [], None
        self._meter, self._is_new_step, self._num_steps = MemoryMeter(module), True, 0

    def _enter(self) -> None:
        assert self._meter is not None
        if self._is_new_step:
            is_recorded = self._path and self._num_steps < RECORDED_STEP
            self._meter.start(recorded=self._num_steps + 1 if is_recorded else None)
            self._is_new_step = False
        self._meter.__enter__()

    def _finish_step(self, meter: MemoryMeter, optimizers: Iterable[Optimizer]) -> None:
        self.last = meter.finish(optimizers)
        self.peak = self.peak.largest(self.last)
        self.timeline = meter.timeline or self.timeline
        self._is_new_step, self._num_steps = True, self._num_steps + 1

    def _close(self, *, draws: bool = False) -> None:
        if self._meter is None:
            return
        self._meter.close()
        self.timeline = self.timeline or self._meter.timeline
        self._meter = None
        if draws and self.timeline is not None and self.timeline.changes:
            fixed = self.last.totals()
            beside = {"parameters": fixed["trainable"] + fixed["frozen"], "optimizer states": fixed["states"]}
            draw = partial(memory_png, self.timeline, beside=beside)
            write_picture(self._path, draw, type(self).__name__)


def _columns(totals: list[dict[str, int]]) -> list[str]:
    """The categories, without those of techniques that no rank uses."""
    return [name for name in Memory().totals() if name not in ELSEWHERE or any(of_rank[name] for of_rank in totals)]


def _table(title: str, first: str, names: list[str], rows: dict[str, list[int]], *, total: bool) -> Table:
    table = Table(title=title)
    table.add_column(first)
    for name in names:
        table.add_column(name, justify="right")
    for name, numbers in rows.items():
        table.add_row(name, *(f"{number:,}" for number in numbers))
    if total:
        table.add_section()
        table.add_row("total", *(f"{sum(column):,}" for column in zip(*rows.values(), strict=True)))
    return table
