"""Puts the parts together for one LightningModule: layout, blocks, partition, cut, engine."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightning_hybrid.parallel.blocks import block_names, find_block_lists
from lightning_hybrid.parallel.cut import StageCut
from lightning_hybrid.parallel.data_parallel import broadcast_value
from lightning_hybrid.parallel.engine import Engine
from lightning_hybrid.parallel.gates import GATE
from lightning_hybrid.parallel.mesh import Layout, Mesh
from lightning_hybrid.parallel.saving import gather_model_state, gather_optimizer_state, state_keys
from lightning_hybrid.parallel.streams import derived_seed
from lightning_hybrid.strategies.compiled import check_compiled
from lightning_hybrid.strategies.hooks import SharedHooks
from lightning_hybrid.strategies.layouts import choose_layout, choose_stages, stage_table
from lightning_hybrid.strategies.metric_objects import MetricObjects
from lightning_hybrid.strategies.optimizers import ParameterGroups
from lightning_hybrid.strategies.steps import StepRunner

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass
class Assembly:
    """What a strategy works with between set-up and tear-down.

    Attributes:
        module: The user's module, cut.
        engine: Runs its steps.
        runner: Micro-batches, losses and records around the engine.
        hooks: Its hooks, which log too.
        keys: State keys of the whole model.
        groups: Parameters of the optimizers over the whole model.
        is_plain: One process and one micro-batch: Lightning's own path serves.
    """

    module: LightningModule
    engine: Engine
    runner: StepRunner
    hooks: SharedHooks
    keys: list[str]
    groups: ParameterGroups | None
    is_plain: bool = False

    def settle(self) -> None:
        """After the first training probe: keep what this rank needs, shard it, and tell the optimizers."""
        if self.engine.settle() is not None and self.groups is not None:
            cut = self.engine.cut
            self.groups.keep(cut.parameters if cut else dict(self.module.named_parameters()))

    def model_state(self) -> dict[str, Any]:
        """State of the whole model on world rank 0, empty elsewhere."""
        return gather_model_state(self.engine, self.keys)

    def optimizer_state(self, optimizers: Sequence[Optimizer], optimizer: Optimizer) -> dict[str, Any]:
        """State of one optimizer over the whole model on world rank 0, empty elsewhere."""
        assert self.groups is not None
        bare = getattr(optimizer, "optimizer", optimizer)
        index = list(optimizers).index(bare)
        return gather_optimizer_state(self.engine, bare, self.groups.names[index], self.groups.given[index])

    def check_loadable(self) -> None:
        """Refuse to load a whole model's state into a part.

        Raises:
            RuntimeError: If the module has been cut or sharded.
        """
        if self.engine.is_partial:
            raise RuntimeError(
                "Loading a checkpoint into a module that is already cut or sharded is not supported yet (test or "
                "validate with ckpt_path after fit). Pass the model itself to use its present weights, or "
                "load_from_checkpoint into a new module."
            )

    def check_whole(self) -> None:
        """Refuse a second `fit` of a cut module: its optimizers would see only what is here.

        Raises:
            RuntimeError: If the module has been cut.
        """
        if self.engine.cut is not None:
            raise RuntimeError(
                "This LightningModule has been cut into pipeline stages by an earlier call, so that "
                "configure_optimizers cannot see all of it. Fit first, or make a new module and a new Trainer; fit "
                "takes ckpt_path to go on from a checkpoint."
            )


@dataclass(frozen=True)
class Ground:
    """What is known before the optimizers are made: loaders, which schedulers may ask for, need it already.

    Attributes:
        mesh: Groups of this rank.
        blocks: Names of the blocks to cut between.
        sizes: Blocks of each stage; empty on a pipeline of one rank.
        seed: Base of all seeds, the same on every rank.
    """

    mesh: Mesh
    blocks: list[str]
    sizes: list[int]
    seed: int


def survey(
    module: LightningModule, options: dict[str, Any], *, device: torch.device, timeout: timedelta | None
) -> Ground:
    """Choose the layout and make its groups; every rank must call it with an equal module.

    Args:
        module: The whole module.
        options: The strategy's keywords.
        device: Where this rank computes.
        timeout: Of collectives.

    Raises:
        ValueError: If the model does not fit the keywords.
    """
    _check_untouched(module)
    blocks = block_names(module, find_block_lists(module, options["pipeline_layers"]))
    layout = choose_layout(options, blocks, dist.get_world_size())
    if layout.pipeline * layout.data > 1:
        check_compiled(module, blocks, pipeline=layout.pipeline)
    _log_layout(layout, options)
    sizes = _spread(module, options, blocks, layout) if layout.pipeline > 1 else []
    mesh = Mesh(layout, device=device, timeout=timeout)
    return Ground(mesh, blocks, sizes, _agree_on_seed(mesh))


def _spread(module: LightningModule, options: dict[str, Any], blocks: list[str], layout: Layout) -> list[int]:
    """Blocks of each stage, by the costs of world rank 0: each rank may have measured its own."""
    box = [options.get("block_costs")]
    dist.broadcast_object_list(box, 0)
    stages = choose_stages({**options, "block_costs": box[0]}, module, blocks, layout.pipeline * options["num_chunks"])
    rank_zero_info(stage_table(stages, blocks, layout.pipeline, estimated=box[0] is None))
    return stages.sizes


def assemble(
    module: LightningModule, options: dict[str, Any], ground: Ground, groups: ParameterGroups | None
) -> Assembly:
    """Cut the module and build everything that runs it; every rank must call it with an equal module.

    Args:
        module: The whole module, changed in place.
        options: The strategy's keywords.
        ground: From `survey`.
        groups: The optimizers' parameters, if there are optimizers.
    """
    mesh = ground.mesh
    _broadcast_whole(module, mesh.device)
    keys = state_keys(module)
    zero_stage = _shardable_stage(options["zero_stage"], module, mesh)  # a decision about the whole model
    _warn_of_batch_norm(module, mesh, options["num_microbatches"])
    cut = None
    if mesh.layout.pipeline > 1:
        pipeline, rank = mesh.layout.pipeline, mesh.pipeline_rank
        cut = StageCut(module, ground.blocks, ground.sizes, pipeline=pipeline, rank=rank, device=mesh.device)
        _turn_off_nested_tensors(module)
        if groups is not None:
            groups.keep(cut.parameters)
    module.to(mesh.device)
    engine = Engine(
        module,
        cut,
        mesh,
        schedule=options["schedule"],
        num_chunks=options["num_chunks"],
        zero_stage=zero_stage,
        seed=ground.seed,
    )
    metrics = MetricObjects(module, mesh, cut.keeper if cut else None)
    num_microbatches = options["num_microbatches"]
    runner = StepRunner(module, engine, metrics, options["schedule"], options["num_chunks"], num_microbatches)
    return Assembly(module, engine, runner, SharedHooks(module, engine), keys, groups)


def _check_untouched(module: nn.Module) -> None:
    if any(GATE in vars(child) or isinstance(child, FSDPModule) for child in module.modules()):
        raise RuntimeError(
            "This LightningModule was cut or sharded by another Trainer. Go on with that Trainer, or make a new module."
        )
    if any(parameter.is_meta for parameter in module.parameters()):
        raise RuntimeError(
            "The model has parameters on the meta device, which is not supported yet: build it on the CPU."
        )


def _shardable_stage(zero_stage: int, module: nn.Module, mesh: Mesh) -> int:
    """The ZeRO stage, or 0 if `fully_shard` cannot take the model; the same on every rank."""
    if zero_stage == 0 or mesh.layout.data == 1:
        return zero_stage
    odd = [name for name, p in module.named_parameters() if p.ndim == 0 or not p.is_contiguous()]
    if len({p.dtype for p in module.parameters() if p.requires_grad}) > 1:
        odd.append("parameters of several types")
    if odd:
        rank_zero_warn(
            f"zero_stage={zero_stage} cannot shard {', '.join(odd[:3])}: only contiguous parameters with dimensions, "
            "of one type. Optimizer states are replicated, as with zero_stage=0."
        )
    return 0 if odd else zero_stage


def _warn_of_batch_norm(module: nn.Module, mesh: Mesh, num_microbatches: int | str) -> None:
    norms = [name for name, child in module.named_modules() if isinstance(child, BATCH_NORMS)]
    one = mesh.layout.data == 1 and (
        num_microbatches == 1 or (num_microbatches == "auto" and mesh.layout.pipeline == 1)
    )
    if norms and not one:
        rank_zero_warn(
            f"{norms[0]} normalises by the statistics of each micro-batch, so that results depend on the number of "
            "micro-batches and replicas."
        )


def _agree_on_seed(mesh: Mesh) -> int:
    """World rank 0's seed; without `seed_everything` the ranks of a replica also start their own streams alike."""
    seed = torch.tensor(torch.initial_seed() % 2**62, device=mesh.device)
    dist.broadcast(seed, 0)
    if "PL_GLOBAL_SEED" not in os.environ and mesh.layout.pipeline > 1:
        start = derived_seed(int(seed), "replica", mesh.data_rank)
        torch.manual_seed(start)
        random.seed(start)
        numpy.random.seed(start % 2**32)
    return int(seed)


def _broadcast_whole(module: nn.Module, device: torch.device) -> None:
    """Start from the weights of world rank 0, as one process would."""
    if dist.get_world_size() == 1:
        return
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            on_device = tensor.to(device)
            broadcast_value(on_device, 0)
            if on_device is not tensor:
                tensor.copy_(on_device)


def _turn_off_nested_tensors(module: nn.Module) -> None:
    """`nn.TransformerEncoder` would pass nested tensors on in evaluation; stages exchange plain ones."""
    for encoder in module.modules():
        if isinstance(encoder, nn.TransformerEncoder):
            encoder.enable_nested_tensor = encoder.use_nested_tensor = False


def _log_layout(layout: Layout, options: dict[str, Any]) -> None:
    rank_zero_info(
        f"hybrid_ptdp: pipeline {layout.pipeline} x data {layout.data} x tensor {layout.tensor}, "
        f"{options['num_chunks']} chunk(s) a rank, schedule {options['schedule']}, zero_stage {options['zero_stage']}"
    )
