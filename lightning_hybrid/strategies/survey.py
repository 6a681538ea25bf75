"""What is decided about a whole model before it is cut: layout, blocks, partition, tensor plan, seed."""

from __future__ import annotations

import os
import random
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

from lightning_hybrid.functional.partition import runs
from lightning_hybrid.parallel.experts.bank import ExpertBank
from lightning_hybrid.parallel.experts.published import PublishedBank
from lightning_hybrid.parallel.mesh import Layout, Mesh
from lightning_hybrid.parallel.meta.initialising import Initialiser, has_meta
from lightning_hybrid.parallel.pipeline.blocks import block_names, find_block_lists
from lightning_hybrid.parallel.pipeline.gates import GATE
from lightning_hybrid.parallel.streams import derived_seed
from lightning_hybrid.parallel.tensor.assignment import Assignment
from lightning_hybrid.parallel.tensor.install import SHOWN
from lightning_hybrid.parallel.tensor.plan import make_plan, plan_table
from lightning_hybrid.strategies.compiled import check_compiled
from lightning_hybrid.strategies.layouts import choose_layout, choose_stages, stage_table

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class Ground:
    """What is known before the optimizers are made: loaders, which schedulers may ask for, need it already.

    Attributes:
        mesh: Groups of this rank.
        blocks: Names of the blocks to cut between.
        sizes: Blocks of each stage; empty on a pipeline of one rank.
        runs: Consecutive blocks of one list on one stage, of all stages.
        assignments: The tensor plan; empty on a tensor axis of one rank.
        seed: Base of all seeds, the same on every rank.
        initialiser: Makes what is on the meta device; None where nothing is.
        param_dtype: 16-bit type in which steps see float32 parameters; None where they see them as they are.
    """

    mesh: Mesh
    blocks: list[str]
    sizes: list[int]
    runs: list[list[str]]
    assignments: list[Assignment]
    seed: int
    initialiser: Initialiser | None = None
    param_dtype: torch.dtype | None = None


def survey(
    module: LightningModule,
    options: dict[str, Any],
    device: torch.device,
    timeout: timedelta | None,
    *,
    seed: int | None = None,
    param_dtype: torch.dtype | None = None,
) -> Ground:
    """Choose the layout and make its groups; every rank must call it with an equal module.

    Args:
        module: The whole module.
        options: The strategy's keywords.
        device: Where this rank computes.
        timeout: Of collectives.
        seed: Base of all seeds of a run that goes on; None for a new run.
        param_dtype: 16-bit type in which steps see float32 parameters; None where they see them as they are.

    Raises:
        ValueError: If the model does not fit the keywords.
    """
    _check_untouched(module)
    lists = [block_names(module, [name]) for name in find_block_lists(module, options["pipeline_layers"])]
    blocks = [block for of_list in lists for block in of_list]
    layout = choose_layout(options, blocks, dist.get_world_size(), masters=param_dtype is not None)
    if layout.world_size > 1:
        check_compiled(module, blocks, pipeline=layout.pipeline, tensor=layout.tensor)
    _log_layout(layout, options)
    if options["pipeline_parallel_size"] == "auto" and layout.replica == 1 and layout.data > 1 < len(blocks):
        rank_zero_warn(
            f"pipeline_parallel_size='auto' splits nothing: no divisor of {layout.data} processes is from 2 to "
            f"{len(blocks)}, the number of blocks, so that each process holds the whole model. Start another number of "
            "processes to split it, or set pipeline_parallel_size=1 if this is meant."
        )
    sizes = _spread(module, options, blocks, layout) if layout.pipeline > 1 else []
    assignments = _plan(module, options, blocks, layout) if layout.tensor > 1 else []
    initialiser = _initialiser(module, blocks)
    mesh = Mesh(layout, device=device, timeout=timeout)
    agreed = _agree_on_seed(mesh)
    seed = agreed if seed is None else seed
    return Ground(mesh, blocks, sizes, runs(lists, sizes), assignments, seed, initialiser, param_dtype)


def _spread(module: LightningModule, options: dict[str, Any], blocks: list[str], layout: Layout) -> list[int]:
    """Blocks of each stage, by the costs of world rank 0: each rank may have measured its own."""
    box = [options.get("block_costs")]
    dist.broadcast_object_list(box, 0)
    stages = choose_stages({**options, "block_costs": box[0]}, module, blocks, layout.pipeline * options["num_chunks"])
    rank_zero_info(stage_table(stages, blocks, layout, estimated=box[0] is None))
    return stages.sizes


def _plan(module: nn.Module, options: dict[str, Any], blocks: list[str], layout: Layout) -> list[Assignment]:
    """Which matrices are split and how; the same on every rank, and shown once."""
    sequence_parallel = bool(options["sequence_parallel"])
    plan = make_plan(
        module, blocks, layout.tensor, options["tensor_parallel_plan"], sequence_parallel=sequence_parallel
    )
    rank_zero_info(plan_table(module, plan, layout.tensor, pipeline=layout.pipeline))
    if not any(assignment.splits for assignment in plan):
        rank_zero_warn(
            f"tensor_parallel_size={layout.tensor} splits nothing: the plan leaves every matrix whole, so that all "
            f"{layout.tensor} ranks compute the same. Name linear layers in tensor_parallel_plan, or set "
            "tensor_parallel_size=1 and leave the ranks to other axes."
        )
    return plan


def _check_untouched(module: nn.Module) -> None:
    for child in module.modules():
        is_cut = GATE in vars(child) or SHOWN in vars(child) or isinstance(child, FSDPModule)
        if is_cut or (isinstance(child, ExpertBank | PublishedBank) and child.exchange is not None):
            raise RuntimeError(
                "This LightningModule was cut, split or sharded by another Trainer. Go on with that Trainer, or make a "
                "new module."
            )


def _initialiser(module: nn.Module, blocks: list[str]) -> Initialiser | None:
    if not has_meta(module):
        return None
    initialiser = Initialiser(module, blocks)
    initialiser.check()
    return initialiser


def _agree_on_seed(mesh: Mesh) -> int:
    """World rank 0's seed; without `seed_everything` the ranks of a replica also start their own streams alike."""
    seed = torch.tensor(torch.initial_seed() % 2**62, device=mesh.device)
    dist.broadcast(seed, 0)
    if "PL_GLOBAL_SEED" not in os.environ and mesh.layout.replica > 1:
        start = derived_seed(int(seed), "replica", mesh.data_rank)
        torch.manual_seed(start)
        random.seed(start)
        numpy.random.seed(start % 2**32)
    return int(seed)


def _log_layout(layout: Layout, options: dict[str, Any]) -> None:
    sequence = options.get("sequence_parallel", False)
    mode = f" (sequence_parallel {sequence})" if sequence else ""
    data = f"{layout.data}" if layout.replicate == 1 else f"{layout.data} ({layout.replicate} x {layout.shard})"
    experts = f", experts over {layout.expert}" if layout.expert > 1 else ""
    rank_zero_info(
        f"hybrid_ptdp: pipeline {layout.pipeline} x data {data} x tensor {layout.tensor}{mode}{experts}, "
        f"{options['num_chunks']} chunk(s) a rank, schedule {options['schedule']}, zero_stage {options['zero_stage']}"
    )


def warn_of_batch_norm(module: nn.Module, mesh: Mesh, num_microbatches: int | str) -> None:
    """Warn of statistics that depend on the layout."""
    norms = [name for name, child in module.named_modules() if isinstance(child, BATCH_NORMS)]
    one = mesh.layout.data == 1 and (
        num_microbatches == 1 or (num_microbatches == "auto" and mesh.layout.pipeline == 1)
    )
    if norms and not one:
        rank_zero_warn(
            f"{norms[0]} normalises by the statistics of each micro-batch, so that results depend on the number of "
            "micro-batches and replicas."
        )
