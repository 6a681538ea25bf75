"""Who keeps which parameter: settled once, when the probes have shown what each stage reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_hybrid.parallel.gradients import sum_gradients
from lightning_hybrid.parallel.mesh import Mesh
from lightning_hybrid.parallel.pipeline.cut import StageCut
from lightning_hybrid.parallel.pipeline.plan import Needs


@dataclass(frozen=True)
class Ownership:
    """Holders of every parameter of the whole model.

    Attributes:
        holders: Pipeline ranks that hold a parameter, ascending; the first is its owner.
        groups: For each set of several holders that this rank is among, their group.
        callers: For modules outside the blocks, the stages that call them on true values.
        writers: For modules outside the blocks and buffers that the step writes: the pipeline rank with true values.
        released: Parameters that this rank held before and no longer does.
    """

    holders: dict[str, tuple[int, ...]]
    groups: dict[tuple[int, ...], dist.ProcessGroup]
    callers: dict[str, list[int]]
    writers: dict[str, int]
    released: list[nn.Parameter]

    def owner(self, name: str) -> int:
        """The pipeline rank that counts and saves a parameter."""
        return self.holders[name][0]

    def sum_shared_gradients(self, cut: StageCut) -> None:
        """Sum the gradients of parameters that several stages hold, such as tied embeddings, over their holders."""
        for holders, group in self.groups.items():
            shared = [p for name, p in cut.parameters.items() if self.holders[name] == holders]
            sum_gradients(shared, group, device=cut.device)


def settle(cut: StageCut, mesh: Mesh, needs: dict[int, Needs]) -> Ownership:
    """Decide the holders of each parameter, let go of the rest, make the groups; the whole world calls it together.

    A parameter outside the blocks is held by the stages that read it; one that no stage has read so far stays
    everywhere.

    Args:
        cut: This rank's view of the model.
        mesh: Groups of this rank.
        needs: For each stage of this rank, what its probes found it to use outside the blocks.
    """
    everyone: list[Any] = [None] * mesh.layout.world_size
    dist.all_gather_object(everyone, needs)
    readers: dict[str, set[int]] = {}
    writers: dict[str, int] = {}
    callers: dict[str, list[int]] = {}
    # a module's first stage runs it on true values; a buffer is complete on the last stage that writes it with such
    for stage, needed in sorted((item for other in everyone for item in other.items()), key=lambda item: item[0]):
        for name in needed.parameters:
            readers.setdefault(name, set()).add(stage)
        for name in needed.modules:
            writers.setdefault(name, stage % cut.pipeline)
            callers[name] = sorted({*callers.get(name, ()), stage})
        writers |= dict.fromkeys(needed.buffers, stage % cut.pipeline)
    holders = {name: _holders(cut, readers.get(name, set()), name) for name in cut.names}
    released = [cut.release(name) for name in list(cut.parameters) if mesh.pipeline_rank not in holders[name]]
    _close_gates(cut)
    groups = {}
    for ranks in sorted({ranks for ranks in holders.values() if len(ranks) > 1}):
        group = mesh.group(_partition(mesh, ranks), "holders")
        if mesh.pipeline_rank in ranks:
            groups[ranks] = group
    return Ownership(holders, groups, callers, writers, released)


def _holders(cut: StageCut, readers: set[int], name: str) -> tuple[int, ...]:
    stages = readers | cut.block_stages.get(name, set())
    return tuple(sorted({stage % cut.pipeline for stage in stages or range(cut.num_stages)}))


def _partition(mesh: Mesh, ranks: tuple[int, ...]) -> list[list[int]]:
    """The holders in each replica; every other rank alone, so that the groups cover the world."""
    layout = mesh.layout
    together = [[layout.rank(p, d, t) for p in ranks] for d in range(layout.data) for t in range(layout.tensor)]
    grouped = {rank for group in together for rank in group}
    return together + [[rank] for rank in range(layout.world_size) if rank not in grouped]


def _close_gates(cut: StageCut) -> None:
    """Modules outside the blocks that have lost a parameter cannot run here any more."""
    held = {id(stand_in) for stand_in in cut.stand_ins.values()}
    for gate in cut.gates:
        if gate.position is None:
            modules = cut.root.get_submodule(gate.name).modules()
            gate.owned = not any(id(value) in held for module in modules for value in vars(module).values())
