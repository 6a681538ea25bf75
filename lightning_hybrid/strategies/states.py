"""What a strategy has between set-up and tear-down, and what of it a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hybrid.parallel.meta.materialising import initialise_whole
from lightning_hybrid.strategies.assembly import Assembly
from lightning_hybrid.strategies.evaluation import Evaluation
from lightning_hybrid.strategies.precisions import Masters, ours
from lightning_hybrid.strategies.processes import ProcessStrategy
from lightning_hybrid.strategies.resuming import Resuming
from lightning_hybrid.strategies.survey import Ground


class StatefulStrategy(ProcessStrategy):
    """Saves and loads the whole model's state, of which each rank holds a part.

    Args:
        process_group_backend: Backend of the default process group; None chooses by device.
        timeout: Longest wait of a collective; None takes torch's default.

    Attributes:
        evaluation: Runs evaluation batches, and knows the loaders of all stages.
        resuming: What a checkpoint says about a run that goes on.
    """

    def __init__(self, process_group_backend: str | None, timeout: timedelta | None) -> None:
        super().__init__(process_group_backend, timeout)
        self._ground: Ground | None = None
        self._assembly: Assembly | None = None
        self.evaluation, self.resuming = Evaluation(), Resuming()

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        """Take this package's plugin in the place of Lightning's for 16 bits."""
        chosen = None if precision_plugin is None else ours(precision_plugin)
        ProcessStrategy.precision_plugin.fset(self, chosen)  # type: ignore[attr-defined]

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """16-bit type in which steps see float32 masters; None where they see parameters as they are."""
        precision = self.precision_plugin
        return precision.compute_dtype if isinstance(precision, Masters) else None

    @property
    def ground(self) -> Ground:
        """Layout and groups; they exist once Lightning sets the strategy up, before the optimizers are made."""
        if self._ground is None:
            raise RuntimeError("Trainer.fit, validate, test or predict sets the strategy up; it has no layout before.")
        return self._ground

    @property
    def assembly(self) -> Assembly:
        """The engine and what belongs to it; it exists after the optimizers."""
        if self._assembly is None:
            raise RuntimeError("Trainer.fit, validate, test or predict sets the strategy up; it has no engine before.")
        return self._assembly

    @property
    def is_fitting(self) -> bool:
        """Whether `Trainer.fit` runs."""
        assert self.lightning_module is not None
        return bool(self.lightning_module.trainer.state.fn == TrainerFn.FITTING)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self.assembly.model_state()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self.assembly.optimizer_state(self.optimizers, optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        self.assembly.add_training_state(checkpoint, self.evaluation.loaders.generator_states())
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self.is_fitting:
            self.resuming.remember(checkpoint)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._assembly is not None and self._assembly.module is self.lightning_module:
            self._assembly.load_model_state(checkpoint["state_dict"], strict=strict)
        else:
            assert self.lightning_module is not None
            initialise_whole(self.lightning_module, torch.initial_seed() % 2**62, torch.device("cpu"))
            super().load_model_state_dict(checkpoint, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self.assembly.load_optimizer_states(self.optimizers, checkpoint)
