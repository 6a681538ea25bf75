"""Bytes and calls of all collectives of an optimizer step, by axis, phase and collective."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.table import Table
from typing_extensions import override

from lightning_hybrid.callbacks.reports import is_logging_step, log_bytes, show
from lightning_hybrid.parallel.ledgers.traffic import Counts, TrafficCounter, accumulate, over_ranks, sums


class CommunicationLedger(Callback):
    """Counts what this rank communicates in each optimizer step, with any strategy.

    As a callback, a step reaches from the first batch of its accumulation window to the end of its last; validation,
    checkpoints and what happens between batches are not part of one. Every `log_every_n_steps` steps the sums over all
    ranks are logged, equal on every rank, as `communication/AXIS/PHASE/payload_bytes` and `.../wire_bytes`, receives
    left out. At the end of `fit` rank 0 prints a table. The first steps also carry what happens once, such as the
    probes of `hybrid_ptdp`.

    As a context manager (`with CommunicationLedger() as ledger:`) it counts all in the block, as one step.

    Attributes:
        last: Counts of the last finished step on this rank: `Row` to `Traffic`.
        total: Sum over all steps.
        num_steps: Finished steps.
        world: After the end: sum of `last` over all ranks, the same on each; in a context manager, this rank's.
    """

    def __init__(self) -> None:
        self.last: Counts = {}
        self.total: Counts = {}
        self.world: Counts = {}
        self.num_steps = 0
        self._counter = TrafficCounter()
        self._active = ExitStack()
        self._global_step = 0

    def __enter__(self) -> CommunicationLedger:
        self._start()
        self._counter.enabled = True
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()
        self._finish_step()
        self.world = self.last

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start()
        self._global_step = trainer.global_step

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._counter.enabled = True

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._counter.enabled = False
        if trainer.global_step == self._global_step:
            return  # within an accumulation window
        self._global_step = trainer.global_step
        self._finish_step()
        if is_logging_step(trainer):
            for (axis, phase), traffic in sums(_over_world(self.last)).items():
                log_bytes(pl_module, f"communication/{axis}/{phase}/payload_bytes", traffic.payload)
                log_bytes(pl_module, f"communication/{axis}/{phase}/wire_bytes", traffic.wire)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._counter.enabled = False  # a hook may have skipped the rest of the epoch in the middle of a batch

    def leave_batch(self, trainer: Trainer) -> None:
        """See `callback_states.leave_batch`; what the batch sent is of no step."""
        self._counter.take()
        self._counter.enabled = False

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()
        self.world = _over_world(self.last)
        show(trainer, self.table())

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def table(self) -> Table:
        """The last step of this rank and of all ranks together."""
        table = Table(title=f"Communication in an optimizer step (number {self.num_steps}), bytes")
        for name in ("axis", "phase", "collective", "dtype"):
            table.add_column(name)
        for name in ("calls, this rank", "payload", "wire", "calls, all ranks", "payload", "wire"):
            table.add_column(name, justify="right")
        for row in sorted({*self.last, *self.world}):
            numbers = [counts.get(row) for counts in (self.last, self.world)]
            cells = [(n.calls, n.payload, n.wire) if n else (0, 0, 0.0) for n in numbers]
            table.add_row(*row, *(f"{number:,.0f}" for cell in cells for number in cell))
        return table

    def _start(self) -> None:
        self._stop()
        self.last, self.total, self.world, self.num_steps = {}, {}, {}, 0
        self._counter.take()
        self._counter.enabled = False
        self._active.enter_context(self._counter)

    def _stop(self) -> None:
        self._active.close()

    def _finish_step(self) -> None:
        self.last = self._counter.take()
        accumulate(self.total, self.last)
        self.num_steps += 1


def _over_world(counts: Counts) -> Counts:
    total: Counts = {}
    for other in over_ranks(counts):
        accumulate(total, other)
    return total
