"""What a strategy has between set-up and tear-down, and what of it a checkpoint keeps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hybrid.parallel.checkpoint import manifest as folders
from lightning_hybrid.parallel.checkpoint.stored import StoredState
from lightning_hybrid.parallel.checkpoint.window import WholeTensors
from lightning_hybrid.parallel.meta.initialising import has_meta
from lightning_hybrid.strategies.assembly import Assembly
from lightning_hybrid.strategies.checkpoints import (
    READER,
    Checkpoints,
    load_folder,
    refuse_links,
    refuse_remote_folders,
)
from lightning_hybrid.strategies.clipping import Clipping
from lightning_hybrid.strategies.collecting import collect, looks_at_values, stand_ins
from lightning_hybrid.strategies.evaluation import Evaluation
from lightning_hybrid.strategies.files import WholeFiles
from lightning_hybrid.strategies.precisions import Masters, ours
from lightning_hybrid.strategies.processes import ProcessStrategy
from lightning_hybrid.strategies.resuming import ENTRY, Resuming
from lightning_hybrid.strategies.survey import Ground
from lightning_hybrid.strategies.windows import ResumedWindow


class StatefulStrategy(ProcessStrategy):
    """Saves and loads the whole model's state, of which each rank holds a part.

    Args:
        process_group_backend: Backend of the default process group; None chooses by device.
        timeout: Longest wait of a collective; None takes torch's default.
        async_save: Training goes on while a checkpoint is written.

    Attributes:
        evaluation: Runs evaluation batches, and knows the loaders of all stages.
        checkpoints: Writes and reads them.
        resuming: What a checkpoint says about a run that goes on.
    """

    def __init__(
        self, process_group_backend: str | None, timeout: timedelta | None, *, async_save: bool = False
    ) -> None:
        super().__init__(process_group_backend, timeout)
        self._ground: Ground | None = None
        self._assembly: Assembly | None = None
        self._waiting_model: tuple[Mapping[str, Any], bool] | None = None
        self._loaded_from: Any = None
        self.evaluation, self.resuming = Evaluation(), Resuming()
        self.checkpoints = Checkpoints(timeout, background=async_save)

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
    def clipping(self) -> Clipping | None:
        """Norms and clipping over all axes; None before set-up."""
        return self._assembly.clipping if self._assembly is not None else None

    @property
    def is_fitting(self) -> bool:
        """Whether `Trainer.fit` runs."""
        assert self.lightning_module is not None
        return bool(self.lightning_module.trainer.state.fn == TrainerFn.FITTING)

    @override
    def _enter(self, trainer: Trainer | None) -> None:
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            self.check_callbacks(trainer)
        super()._enter(trainer)
        self.signals.has_error = lambda: self.checkpoints.has_failed

    def check_callbacks(self, trainer: Trainer) -> None:
        """Refuse what callbacks could not save; the module may add callbacks after launch."""
        if self.options["async_save"]:
            refuse_links(trainer)
        if self._writes_folders:
            refuse_remote_folders(trainer)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._writes_parts:
            return stand_ins(self.assembly.outline)
        return self.assembly.model_state()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._writes_parts:
            return {}
        return self.assembly.optimizer_state(self.optimizers, optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        assert self.lightning_module is not None
        data = self.evaluation.loaders.training_state(self.lightning_module.trainer)
        self.assembly.add_training_state(checkpoint, data)
        if not self._streams:
            if "optimizer_states" in checkpoint:
                self.checkpoints.add_window(self.assembly, checkpoint)
            self.checkpoints.wait()
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        collected = collect(self.assembly, self.optimizers, checkpoint)
        is_local, wait = storage_options is None and "://" not in str(filepath), self._waits_for(filepath)
        if self._writes_folders:
            if storage_options is not None:
                raise ValueError(
                    f"storage_options={storage_options!r} is not for state_dict_type='sharded', which writes folders "
                    "of a local or shared file system. Leave it out."
                )
            self.checkpoints.save_folder(self.assembly, collected, filepath, wait=wait)
        elif is_local:
            self.checkpoints.save_file(self.assembly, collected, filepath, wait=wait)
        else:
            super().save_checkpoint(self.checkpoints.in_memory(collected), filepath, storage_options)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            parent = super().remove_checkpoint
            self.checkpoints.remove(filepath, lambda: parent(filepath))

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self.checkpoints.wait()
        self._loaded_from = checkpoint_path
        if folders.is_sharded(checkpoint_path):
            checkpoint = load_folder(checkpoint_path, weights_only=weights_only)
        else:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self.is_fitting:
            self.resuming.remember(checkpoint)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        if self._assembly is not None and self._assembly.module is self.lightning_module:
            self._load_model(checkpoint["state_dict"], strict=strict)
        elif isinstance(checkpoint["state_dict"], StoredState) or has_meta(self.lightning_module):
            self._waiting_model = (checkpoint["state_dict"], strict)  # until each rank knows its part
        else:
            super().load_model_state_dict(checkpoint, strict)

    def load_again(self, path: Any) -> None:
        """Go back, between two steps of a fit, to the parameters and optimizer states of a checkpoint of this run."""
        resuming, self.resuming = self.resuming, Resuming()  # the fit after this one is none that goes on from it
        try:
            checkpoint = self.load_checkpoint(path, weights_only=False)
        finally:
            self.resuming = resuming
        self.load_model_state_dict(checkpoint)
        self.load_optimizer_state_dict(checkpoint)

    def load_waiting_model(self) -> None:
        """Load this rank's part of a model's state that has waited for the engine."""
        if self._waiting_model is not None:
            state, strict = self._waiting_model
            self._waiting_model = None
            self._load_model(state, strict=strict)

    def _load_model(self, state: Mapping[str, Any], *, strict: bool) -> None:
        try:
            self.assembly.load_model_state(state, strict=strict)
        except RuntimeError as error:
            raise RuntimeError(f"{self._loaded_from} was not loaded: {error}") from error

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self.assembly.load_optimizer_states(self.optimizers, checkpoint)
        entry = checkpoint.get(ENTRY, {})
        reader = checkpoint.get(READER) or WholeTensors(entry.get("gradients", {}))
        self.assembly.resumed = ResumedWindow(reader, entry.get("window", {}))

    @override
    def on_train_start(self) -> None:
        """Undo what hooks and iterators have drawn by now: in an uninterrupted run they did so long before."""
        assert self.lightning_module is not None
        self.evaluation.loaders.go_on(self.lightning_module.trainer)
        self.resuming.restore_random(self.ground.mesh, in_epoch=True)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self.signals.save_failed or (self.world_size == 1 and self.checkpoints.has_failed):
            self.signals.save_failed = False
            self.checkpoints.wait()
        self.evaluation.loaders.positions.begin()

    @property
    def _streams(self) -> bool:
        """Whether parts are written as they are; hooks and plugins may want whole tensors in a full checkpoint."""
        assert self.lightning_module is not None
        if self._writes_folders:
            return True
        ours = type(self.checkpoint_io) is WholeFiles and self.assembly.outline.is_plain
        return ours and not looks_at_values(self.lightning_module.trainer)

    @property
    def _writes_parts(self) -> bool:
        return self.checkpoints.is_dumping and self._streams

    @property
    def _writes_folders(self) -> bool:
        return bool(self.options["state_dict_type"] == "sharded")

    def _waits_for(self, path: Any) -> bool:
        """Whether a save must be complete when it returns: training does not go on, or SLURM ends the job next."""
        assert self.lightning_module is not None
        state = self.lightning_module.trainer.state
        goes_on = self.is_fitting and state.status == TrainerStatus.RUNNING
        return not goes_on or os.path.basename(str(path)).startswith("hpc_ckpt_")
