"""Puts the parts together that run one LightningModule: it is split, cut and made, and gets an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

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
from lightning_hybrid.strategies.assembly import Assembly
from lightning_hybrid.strategies.hooks import SharedHooks
from lightning_hybrid.strategies.metric_objects import MetricObjects
from lightning_hybrid.strategies.optimizers import ParameterGroups
from lightning_hybrid.strategies.splitting import Splitter
from lightning_hybrid.strategies.steps import StepRunner
from lightning_hybrid.strategies.survey import Ground, warn_of_batch_norm


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
    if experts is not None:
        rank_zero_info(experts.table())
        if groups is not None:
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
    schedule, num_chunks, num_microbatches = (options[key] for key in ("schedule", "num_chunks", "num_microbatches"))
    runner = StepRunner(module, engine, metrics, Splitter(module, engine, schedule, num_chunks, num_microbatches))
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
