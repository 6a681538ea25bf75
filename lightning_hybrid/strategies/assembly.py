"""What runs one LightningModule between set-up and tear-down: engine, runner, hooks, optimizers, states."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from torch.optim import Optimizer

from lightning_hybrid.parallel.checkpoint.loading import (
    SavedOptimizer,
    WholeOptimizer,
    check_number,
    load_groups,
    load_model_state,
    load_optimizer_state,
)
from lightning_hybrid.parallel.checkpoint.saving import gather_model_state, gather_optimizer_state
from lightning_hybrid.parallel.checkpoint.states import Outline
from lightning_hybrid.parallel.engine import Engine
from lightning_hybrid.strategies.clipping import Clipping
from lightning_hybrid.strategies.hooks import SharedHooks
from lightning_hybrid.strategies.losses import Window
from lightning_hybrid.strategies.metric_objects import compute_metrics_together
from lightning_hybrid.strategies.optimizers import ParameterGroups
from lightning_hybrid.strategies.precisions import Masters, SkippedSteps
from lightning_hybrid.strategies.resuming import add_state, optimizer_names
from lightning_hybrid.strategies.steps import StepRunner
from lightning_hybrid.strategies.windows import ResumedWindow

STORED = "stored_optimizers"  # entry of a loaded checkpoint: where the optimizers' states are read from


@dataclass
class Assembly:
    """What a strategy works with between set-up and tear-down.

    Attributes:
        module: The user's module, cut.
        engine: Runs its steps.
        runner: Micro-batches, losses and records around the engine.
        hooks: Its hooks, which log too.
        outline: What the whole model saves.
        groups: Parameters of the optimizers over the whole model.
        is_plain: One process and one micro-batch: Lightning's own path serves.
        when_settled: Called once it is settled who has what, and states of optimizers are loaded.
        resumed: The accumulation window of the checkpoint that a run goes on from, until its first batch.
    """

    module: LightningModule
    engine: Engine
    runner: StepRunner
    hooks: SharedHooks
    outline: Outline
    groups: ParameterGroups | None
    is_plain: bool
    clipping: Clipping | None = None
    resumed: ResumedWindow | None = None
    when_settled: list[Callable[[], object]] = field(default_factory=list)
    _skipped: SkippedSteps | None = None
    _waiting: list[tuple[Optimizer, SavedOptimizer]] = field(default_factory=list)

    def settle(self) -> None:
        """After the first training probe: keep what this rank needs, shard it, and tell the optimizers."""
        if self.engine.settle() is not None and self.groups is not None:
            self.groups.keep(self.engine.named_parameters())
        self.load_waiting()
        waiting, self.when_settled = self.when_settled, []
        for call in waiting:
            call()

    def make_whole(self) -> None:
        """End the streaming of blocks: what is saved or loaded must be in memory."""
        streaming = self.engine.zero.streaming
        if streaming is not None and streaming.active:
            streaming.finish()
            if self.engine.cut is not None:
                self.engine.cut.refresh()
            if self.groups is not None:
                self.groups.keep(self.engine.named_parameters())

    def model_state(self) -> dict[str, Any]:
        """State of the whole model on world rank 0, empty elsewhere."""
        self.make_whole()
        return gather_model_state(self.engine, list(self.outline.shapes))

    def optimizer_state(self, optimizers: Sequence[Optimizer], optimizer: Optimizer) -> dict[str, Any]:
        """State of one optimizer over the whole model on world rank 0, empty elsewhere."""
        assert self.groups is not None
        self.load_waiting()
        bare = getattr(optimizer, "optimizer", optimizer)
        index = list(optimizers).index(bare)
        return gather_optimizer_state(self.engine, bare, self.groups.names[index], self.groups.given[index])

    def load_model_state(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Load this rank's part of a whole model's state."""
        self.make_whole()
        load_model_state(self.engine, self.outline, state, strict=strict)

    def load_optimizer_states(self, optimizers: Sequence[Optimizer], checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the states of all optimizers over the whole model.

        Where states are going to be sharded, that waits until they are: nobody has them whole.
        """
        assert self.groups is not None
        saved, stored = checkpoint["optimizer_states"], checkpoint.get(STORED)
        names = optimizer_names(checkpoint, len(saved))
        check_number(optimizers, saved)
        sources: list[SavedOptimizer] = []
        for optimizer, own, state, known in zip(optimizers, self.groups.names, saved, names, strict=True):
            load_groups(optimizer, own, state["param_groups"], known)
            sources.append(WholeOptimizer(state, known or own) if stored is None else stored[len(sources)])
        self._waiting = list(zip(optimizers, sources, strict=True))
        engine = self.engine
        shards = engine.zero.shards(engine.mesh) and engine.ownership is None and self.module.automatic_optimization
        if not shards or self.is_plain:
            self.load_waiting()

    @property
    def awaits_states(self) -> bool:
        """Whether a checkpoint's states of optimizers wait for the first batch."""
        return bool(self._waiting)

    def load_waiting(self) -> None:
        """Load the states of optimizers that have waited for this."""
        waiting, self._waiting = self._waiting, []
        for optimizer, saved in waiting:
            load_optimizer_state(self.engine, optimizer, saved)

    def layout(self) -> dict[str, int]:
        """Sizes of the axes, for people."""
        layout, zero = self.engine.mesh.layout, self.engine.zero
        sizes = {"pipeline": layout.pipeline, "data": layout.data, "tensor": layout.tensor, "expert": layout.expert}
        chunks = self.engine.num_stages // layout.pipeline
        return {**sizes, "replicate": layout.replicate, "chunks": chunks, "zero_stage": zero.stage}

    @contextmanager
    def whole_module(self) -> Iterator[None]:
        """Context in which the module names all of its parameters, also those that are elsewhere."""
        with self.engine.cut.whole() if self.engine.cut is not None else nullcontext():
            yield

    def add_training_state(self, checkpoint: dict[str, Any], data: dict[str, Any]) -> None:
        """Complete a checkpoint, so that training can go on from it under any layout."""
        names = self.groups.names if self.groups is not None else []
        add_state(checkpoint, self.engine.mesh, seed=self.engine.seed, names=names, data=data)

    def restart(self, seed: int | None) -> None:
        """Begin again, also behind an exception: parameters are masters, and shards, until the first step.

        Args:
            seed: Base of random numbers of a run that goes on; None for a new run, which draws on.
        """
        self.engine.data.restart()
        self.when_settled.clear()
        if seed is not None:
            self.engine.seed = seed

    def use(self, groups: ParameterGroups) -> None:
        """Take new optimizers, made over the whole module, for what this rank holds of it."""
        self.engine.forget_gradients()  # of a window that a run before has not finished
        self.runner.window = Window()
        groups.keep(self.engine.named_parameters())
        self.groups = groups

    def install(self, trainer: Trainer, precision: Precision) -> None:
        """Take the place of what sees this rank only: hooks, metrics and clipping."""
        # every logged value is combined over all ranks before Lightning sees it, and no sample is seen twice
        warnings.filterwarnings("ignore", message="It is recommended to use `self.log\\(.*sync_dist=True")
        warnings.filterwarnings("ignore", message="Using `DistributedSampler` with the dataloaders")
        self.engine.balancing.install()
        if self.engine.mesh.layout.world_size > 1:
            self.hooks.install()
            compute_metrics_together(trainer)
        if self.groups is not None:
            self.groups.tell(self.engine.dealings)
        self.clipping = Clipping(self.engine, precision, self.hooks.norm_watch)
        if isinstance(precision, Masters):
            self._skipped = SkippedSteps(self.module, precision)

    def remove(self) -> None:
        """Give everything back."""
        self.engine.balancing.remove()
        self.hooks.remove()
        if self.clipping is not None:
            self.clipping.remove()
        if self._skipped is not None:
            self._skipped.remove()
