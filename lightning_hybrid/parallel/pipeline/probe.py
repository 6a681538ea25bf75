"""The probe: the stages dry-run one micro-batch one after the other, and each hands the next what it found out."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.parallel.failures.failure import OtherStageError
from lightning_hybrid.parallel.mesh import Mesh
from lightning_hybrid.parallel.pipeline.cut import StageCut
from lightning_hybrid.parallel.pipeline.plan import Call, Needs, Output, Plan, TensorSpec
from lightning_hybrid.parallel.pipeline.probe_run import ProbeRun
from lightning_hybrid.parallel.pipeline.recorded import (
    Recorded,
    find_recorded,
    guard,
    refuse_hidden,
    warn_of_counters,
    written_buffers,
)
from lightning_hybrid.parallel.pipeline.run import Result
from lightning_hybrid.parallel.pipeline.snapshot import Snapshot

RunStage = Callable[[ProbeRun], Result]
"""Runs the user's step as the given stage: it calls `run.run(step)` inside whatever must surround a step."""


@dataclass(frozen=True)
class Stopped:
    """Why a stage could not be run.

    Attributes:
        message: Says which stage, and what happened.
        refused: We refuse the model; else an error of the user's own code.
    """

    message: str
    refused: bool

    @classmethod
    def by(cls, error: Exception, stage: int) -> Stopped:
        """Tell by where it was raised what an exception is."""
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        raised_in = str(frames[-1].f_globals.get("__name__"))
        # a metric refuses in the user's step, and says nothing of the cut
        ours = raised_in.startswith("lightning_hybrid.") and not raised_in.startswith("lightning_hybrid.metrics.")
        refused = ours and not frames[-1].f_code.co_name.startswith("__torch")  # an operation that we only watch
        headline = "The model cannot be cut like this. On" if refused else "The step failed on"
        return cls(f"{headline} stage {stage}: {type(error).__name__}: {error}", refused)

    def raise_elsewhere(self) -> NoReturn:
        """Raise on the ranks that could run their stages."""
        raise RuntimeError(self.message) if self.refused else OtherStageError(self.message)


@dataclass
class Header:
    """What one stage's probe hands to the next."""

    outputs: dict[Call, Output] = field(default_factory=dict)
    exit: tuple[int, ...] = ()
    num_arguments: int = 0
    specs: tuple[TensorSpec, ...] = ()
    payload: list[Tensor] = field(default_factory=list)
    recorded: Recorded = field(default_factory=Recorded)
    failure: Stopped | None = None


@dataclass
class Probed:
    """A rank's share of a probe.

    Attributes:
        plans: For each stage of this rank.
        needs: For each of them, what it uses outside the blocks.
    """

    plans: dict[int, Plan]
    needs: dict[int, Needs]


def probe(cut: StageCut, mesh: Mesh, key: Hashable, run_stage: RunStage, *, training: bool) -> Probed:
    """Dry-run every stage once; all ranks of a replica call it together.

    Args:
        cut: This rank's view of the model. Its buffers, attributes and random streams are as before afterwards.
        mesh: Groups of this rank.
        key: What the plans are valid for.
        run_stage: Runs the user's step on the micro-batch.
        training: A backward pass will follow.

    Raises:
        RuntimeError: On every rank, if any stage cannot run.
    """
    probed = Probed({}, {})
    error: Exception | None = None
    for stage in cut.stages:
        header = Header() if stage == 0 else _receive(mesh, stage)
        if header.failure is None:
            try:
                header = _probe_stage(cut, mesh, stage, Plan(key), header, run_stage, probed, training)
            except Exception as caught:  # whatever it is, the other ranks must not wait for this stage
                error, header = caught, Header(failure=Stopped.by(caught, stage))
        if stage + 1 < cut.num_stages:
            dist.send_object_list([header], dst=mesh.rank_of_stage(stage + 1), group=mesh.pipeline_group)
    cut.searched = cut.searched or training
    _agree(cut, mesh, probed, error, header.failure)
    return probed


def _probe_stage(
    cut: StageCut,
    mesh: Mesh,
    stage: int,
    plan: Plan,
    header: Header,
    run_stage: RunStage,
    probed: Probed,
    training: bool,
) -> Header:
    plan.outputs = header.outputs
    plan.entry, plan.received = header.exit, header.specs
    payload = [
        tensor.to(cut.device).requires_grad_(spec.requires_grad and torch.is_grad_enabled())
        for tensor, spec in zip(header.payload, header.specs, strict=True)
    ]
    guard(cut, header.recorded)
    run = ProbeRun(cut, stage, plan, payload, num_arguments=header.num_arguments, training=training)
    with Snapshot(cut.root, cut.device) as snapshot:
        result = run_stage(run)
        recorded = find_recorded(cut, run, snapshot)
        run.needs.buffers = written_buffers(cut, run, snapshot)
        if training and not cut.searched and stage == 0 and mesh.rank == 0:
            warn_of_counters(cut, snapshot)
        if training and not cut.searched:
            refuse_hidden(cut, run, result.payload)
    guard(cut, recorded)
    plan.weighted = isinstance(result.output, Mapping) and "loss_weight" in result.output
    probed.plans[stage], probed.needs[stage] = plan, run.needs
    sent = [tensor.detach().cpu() for tensor in result.payload]
    return Header(plan.outputs, plan.exit, run.num_arguments, plan.sent, sent, recorded.after(header.recorded))


def _receive(mesh: Mesh, stage: int) -> Header:
    box: list[Any] = [None]
    dist.recv_object_list(box, src=mesh.rank_of_stage(stage - 1), group=mesh.pipeline_group)
    header: Header = box[0]
    return header


def _agree(cut: StageCut, mesh: Mesh, probed: Probed, error: Exception | None, failure: Stopped | None) -> None:
    """Share failures and flags over the replica, so that all ranks go on or all raise."""
    plans = probed.plans.values()
    mine = failure, any(plan.weighted for plan in plans), any(plan.auxiliary for plan in plans)
    everyone: list[Any] = [None] * mesh.layout.pipeline
    dist.all_gather_object(everyone, mine, group=mesh.pipeline_group)
    if error is not None:
        raise error
    for stopped in (other[0] for other in everyone if other[0] is not None):
        stopped.raise_elsewhere()
    for plan in plans:
        plan.weighted = any(other[1] for other in everyone)
        plan.auxiliary = any(other[2] for other in everyone)
