"""Puts the parts together for one LightningModule: cut, engine, metrics, hooks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from torch import nn
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
from lightning_hybrid.parallel.data_parallel import broadcast_whole
from lightning_hybrid.parallel.engine import Engine
from lightning_hybrid.parallel.experts.parallel import ExpertParallel
from lightning_hybrid.parallel.holdings import part_of
from lightning_hybrid.parallel.meta.materialising import Materialiser, without_meta
from lightning_hybrid.parallel.meta.streaming import Streaming
from lightning_hybrid.parallel.pipeline.cut import StageCut
from lightning_hybrid.parallel.tensor.axis import TensorAxis
from lightning_hybrid.parallel.tensor.install import install
from lightning_hybrid.parallel.tensor.parallel import TensorParallel, refuse_outside_steps
from lightning_hybrid.parallel.zero.zero import Zero, reduction_dtype
from lightning_hybrid.strategies.clipping import Clipping
from lightning_hybrid.strategies.hooks import SharedHooks
from lightning_hybrid.strategies.losses import Window
from lightning_hybrid.strategies.metric_objects import MetricObjects, compute_metrics_together
from lightning_hybrid.strategies.optimizers import ParameterGroups
from lightning_hybrid.strategies.precisions import Masters, SkippedSteps
from lightning_hybrid.strategies.resuming import add_state, optimizer_names
from lightning_hybrid.strategies.steps import StepRunner
from lightning_hybrid.strategies.survey import Ground, warn_of_batch_norm
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
    _skipped: SkippedSteps | None = None
    _waiting: list[tuple[Optimizer, SavedOptimizer]] = field(default_factory=list)

    def settle(self) -> None:
        """After the first training probe: keep what this rank needs, shard it, and tell the optimizers."""
        if self.engine.settle() is not None and self.groups is not None:
            self.groups.keep(self.engine.named_parameters())
        self.load_waiting()

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


def assemble(
    module: LightningModule,
    options: dict[str, Any],
    ground: Ground,
    groups: ParameterGroups | None,
    *,
    is_plain: bool = False,
) -> Assembly:
    """Cut the module and build everything that runs it; every rank must call it with an equal module.

    Args:
        module: The whole module, changed in place.
        options: The strategy's keywords.
        ground: From `survey`.
        groups: The optimizers' parameters, if there are optimizers.
        is_plain: One process and one micro-batch.
    """
    mesh = ground.mesh
    broadcast_whole(module, mesh.device)
    outline = Outline.of(module)
    zero = _zero(module, options, ground)  # a decision about the whole model
    if groups is not None and zero.shards(mesh) and module.automatic_optimization:
        groups.check_unmixed(module, torch.float32 if zero.param_dtype else None)
    warn_of_batch_norm(module, mesh, options["num_microbatches"])
    tensor = _split(module, options, ground) if mesh.layout.tensor > 1 else None
    if tensor is not None and groups is not None:
        groups.take(tensor.part)
    experts = ExpertParallel(module, mesh) if mesh.layout.expert > 1 else None
    if experts is not None and groups is not None:
        groups.take(experts.part)
    cut = None
    if mesh.layout.pipeline > 1:
        pipeline, rank = mesh.layout.pipeline, mesh.pipeline_rank
        cut = StageCut(module, ground.blocks, ground.sizes, pipeline=pipeline, rank=rank, device=mesh.device)
        _turn_off_nested_tensors(module)
        if groups is not None:
            groups.keep(cut.parameters)
    streaming = _initialise(module, ground, zero, cut, tensor, experts)
    engine = Engine(
        module,
        cut,
        mesh,
        schedule=options["schedule"],
        num_chunks=options["num_chunks"],
        zero=replace(zero, streaming=streaming),
        seed=ground.seed,
        tensor=tensor,
        experts=experts,
    )
    if ground.initialiser is not None and groups is not None:
        groups.keep(engine.named_parameters())
    metrics = MetricObjects(module, mesh, cut.keeper if cut else None)
    num_microbatches = options["num_microbatches"]
    runner = StepRunner(module, engine, metrics, options["schedule"], options["num_chunks"], num_microbatches)
    return Assembly(module, engine, runner, SharedHooks(module, engine), outline, groups, is_plain)


def _split(module: nn.Module, options: dict[str, Any], ground: Ground) -> TensorParallel:
    """Give this rank its slices of the matrices; the parameters stay the objects that the optimizers have."""
    tensor = TensorParallel(module, ground.assignments, TensorAxis(ground.mesh.tensor_group))
    install(module, ground.runs, tensor, ground.assignments, sequence_parallel=options["sequence_parallel"])
    refuse_outside_steps(module, tensor)
    return tensor


def _initialise(
    module: LightningModule,
    ground: Ground,
    zero: Zero,
    cut: StageCut | None,
    tensor: TensorParallel | None,
    experts: ExpertParallel | None,
) -> Streaming | None:
    """Make what is on the meta device, and move all to the device.

    Returns:
        The blocks that are made while they run only, because they are going to be sharded; None if there are none.
    """
    mesh, streaming = ground.mesh, None
    if ground.initialiser is not None:
        home = torch.device("cpu") if zero.offload else mesh.device

        def part(name: str, whole: Any) -> Any:
            return part_of(tensor, experts, name, whole)

        materialiser = Materialiser(module, ground.initialiser, ground.seed, mesh.device, cut=cut, part=part, home=home)
        sharded = zero.stage == 3 and zero.shards(mesh) and module.automatic_optimization
        sharded = sharded and experts is None  # tokens travel to experts that are there
        if sharded and zero.param_dtype is None:  # 16-bit copies are made of what is there
            streaming = Streaming(materialiser, ground.blocks)
        materialiser.fill(kept_back=streaming.names if streaming is not None else ())
        if cut is not None:
            cut.refresh()
    with without_meta(module):
        module.to(mesh.device)
    return streaming


def _zero(module: nn.Module, options: dict[str, Any], ground: Ground) -> Zero:
    """How states are sharded; the same on every rank."""
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    param_dtype = ground.param_dtype
    dtype = reduction_dtype(options["reduce_dtype"], dtypes, param_dtype)
    stage = options["zero_stage"] if param_dtype is None else max(1, options["zero_stage"])  # see `choose_layout`
    return Zero(stage, ground.blocks, dtype, param_dtype, options["cpu_offload"], options["accumulate_on_cpu"])


def _turn_off_nested_tensors(module: nn.Module) -> None:
    """`nn.TransformerEncoder` would pass nested tensors on in evaluation; stages exchange plain ones."""
    for encoder in module.modules():
        if isinstance(encoder, nn.TransformerEncoder):
            encoder.enable_nested_tensor = encoder.use_nested_tensor = False
