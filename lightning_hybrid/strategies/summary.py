"""The model summary, shown for the whole model instead of what is left of it on a stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary

from lightning_hybrid.parallel.meta.initialising import has_meta


class SummaryBeforeCut:
    """Lets `ModelSummary` callbacks speak before the cut, and keeps them silent afterwards."""

    def __init__(self) -> None:
        self._silenced: list[Callback] = []

    def show(self, trainer: Trainer, module: LightningModule) -> None:
        """Show all summaries now."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ModelSummary) and callback not in self._silenced:
                with _without_example(module) if has_meta(module) else nullcontext():
                    callback.on_fit_start(trainer, module)
                vars(callback)["on_fit_start"] = _nothing
                self._silenced.append(callback)

    def restore(self) -> None:
        """Give the callbacks their voice back."""
        for callback in self._silenced:
            vars(callback).pop("on_fit_start", None)
        self._silenced.clear()


@contextmanager
def _without_example(module: LightningModule) -> Iterator[None]:
    """Context without the input that a summary would run the model with; it cannot run on the meta device."""
    example = module.example_input_array
    module.example_input_array = None
    try:
        yield
    finally:
        module.example_input_array = example


def _nothing(trainer: Trainer, pl_module: LightningModule) -> None:
    """Shown already."""
