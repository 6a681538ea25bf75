"""Plans of micro-batches by structure and shape: what was not met before is probed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from functools import partial

import torch
import torch.distributed as dist

from lightning_hybrid.parallel.mesh import Mesh
from lightning_hybrid.parallel.pipeline.cut import StageCut
from lightning_hybrid.parallel.pipeline.executor import Step
from lightning_hybrid.parallel.pipeline.plan import Needs, Plan
from lightning_hybrid.parallel.pipeline.probe import probe
from lightning_hybrid.parallel.pipeline.probe_run import ProbeRun
from lightning_hybrid.parallel.pipeline.run import Result

REMEMBERED = 1024
"""Structures and shapes whose plans are kept, those used last; ranks of a replica see the same ones."""


class Planner:
    """Keeps the plans of one rank's stages.

    Args:
        cut: This rank's view of the model.
        mesh: Groups of this rank.
        run: Runs a micro-batch of a step, by number, as a probe asks.
        surroundings: Context of a probe.

    Attributes:
        needs: For each stage of this rank, what its probes have found it to use outside the blocks.
    """

    def __init__(
        self,
        cut: StageCut,
        mesh: Mesh,
        run: Callable[[Step, int, ProbeRun], Result],
        surroundings: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._cut, self._mesh, self._run, self._surroundings = cut, mesh, run, surroundings
        self._plans: dict[Hashable, dict[int, Plan]] = {}
        self._trained = self._flags()
        self.needs: dict[int, Needs] = {}

    def heed_frozen(self) -> None:
        """Forget all plans if a parameter was frozen or thawed, on any stage; all ranks of a replica call it together.

        What crosses to the next stage may need a gradient now, or none any more.
        """
        flags = self._flags()
        differs = any(flags[name] != self._trained[name] for name in flags)
        changed = torch.tensor(differs, dtype=torch.int32, device=self._mesh.device)
        dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=self._mesh.pipeline_group)
        self._trained |= flags
        if changed:
            self._plans.clear()

    def knows(self, step: Step) -> bool:
        """Whether no micro-batch of a step has to be probed."""
        return all(key in self._plans for key in step.keys)

    def prepare(self, step: Step, *, training: bool) -> list[dict[int, Plan]]:
        """Plans of each micro-batch, for each stage of this rank; all ranks of a replica call it together."""
        plans = []
        for index, key in enumerate(step.keys):
            plans.append(self._plans.pop(key) if key in self._plans else self._probe(step, index, training))
            self._plans[key] = plans[-1]  # at the end, as the one used last
        for key in list(self._plans)[:-REMEMBERED]:
            del self._plans[key]
        return plans

    def renew(self, step: Step, *, training: bool) -> None:
        """Probe all micro-batches of a step again."""
        for index, key in enumerate(step.keys):
            self._plans[key] = self._probe(step, index, training)

    def _flags(self) -> dict[str, bool]:
        return {name: parameter.requires_grad for name, parameter in self._cut.parameters.items()}

    def _probe(self, step: Step, index: int, training: bool) -> dict[int, Plan]:
        run_stage = partial(self._run, step, index)
        with self._surroundings():
            probed = probe(self._cut, self._mesh, step.keys[index], run_stage, training=training)
        for stage, needs in probed.needs.items():
            self.needs.setdefault(stage, Needs()).add(needs)
        return probed.plans
