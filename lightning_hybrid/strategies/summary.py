"""The model summary, shown for the whole model instead of what is left of it on a stage."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary


class SummaryBeforeCut:
    """Lets `ModelSummary` callbacks speak before the cut, and keeps them silent afterwards."""

    def __init__(self) -> None:
        self._silenced: list[Callback] = []

    def show(self, trainer: Trainer, module: LightningModule) -> None:
        """Show all summaries now."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ModelSummary) and callback not in self._silenced:
                callback.on_fit_start(trainer, module)
                vars(callback)["on_fit_start"] = _nothing
                self._silenced.append(callback)

    def restore(self) -> None:
        """Give the callbacks their voice back."""
        for callback in self._silenced:
            vars(callback).pop("on_fit_start", None)
        self._silenced.clear()


def _nothing(trainer: Trainer, pl_module: LightningModule) -> None:
    """Shown already."""
