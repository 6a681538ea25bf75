"""The demo's progress bar, and what the demo remembers of a training."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from typing_extensions import override

from lightning_hybrid.functional.schedules import Action

Events = list[tuple[int, Action, float, float]]


class Progress(Callback):
    """Show steps, bits per byte and the time left; keep validations and the timelines of the last steps.

    Args:
        late: Number of steps at the end whose timelines are kept, if the strategy records them.
    """

    def __init__(self, late: int) -> None:
        self.late = late
        self.history: list[float] = []  # bits per byte of each validation, the first before training
        self.steps_events: list[Events] = []
        columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}")
        self.bar = Bar(*columns, TimeRemainingColumn(), TextColumn("left"))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.bar.add_task("", total=trainer.num_training_batches)
            self.bar.start()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if hasattr(trainer.strategy, "record_timeline"):
            trainer.strategy.record_timeline = batch_idx >= trainer.num_training_batches - self.late

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if getattr(trainer.strategy, "record_timeline", False):
            self.steps_events.append(trainer.strategy.timeline())  # type: ignore[attr-defined]
        if trainer.is_global_zero:
            bits = float(trainer.callback_metrics["train/bits_per_byte"])
            self.bar.update(self.bar.task_ids[0], advance=1, description=f"{bits:.2f} bits per byte,")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.history.append(float(trainer.callback_metrics["val/bits_per_byte"]))
        if trainer.is_global_zero:
            self.bar.print(f"step {trainer.global_step}: {self.history[-1]:.2f} bits per byte on held-out files")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.bar.stop()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.bar.stop()
