"""What the keywords ask of data parallelism, and a model sharded accordingly once it is known who reads what."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_hybrid.parallel.data_parallel import DataParallel, Replicated
from lightning_hybrid.parallel.experts.parallel import ExpertParallel
from lightning_hybrid.parallel.mesh import Mesh
from lightning_hybrid.parallel.meta.streaming import Streamed, Streaming
from lightning_hybrid.parallel.pipeline.cut import StageCut, ancestors_of, outside_modules
from lightning_hybrid.parallel.pipeline.probe_run import uncompiled
from lightning_hybrid.parallel.pipeline.snapshot import Snapshot
from lightning_hybrid.parallel.tensor.regions import bypass_sharding
from lightning_hybrid.parallel.zero.reads import ReadWatch
from lightning_hybrid.parallel.zero.sharding import Sharded
from lightning_hybrid.parallel.zero.units import choose_units

HEEDS_EACH_CALL = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""`fully_shard` of several modules works if only some of them are called: since torch 2.13, as that method is there."""


@dataclass(frozen=True)
class Zero:
    """How states are spread over the data axis.

    Attributes:
        stage: 0 to 3; 0 shards nothing.
        blocks: Names of the model's blocks.
        reduce_dtype: Type in which gradients are summed; None takes each parameter's own.
        param_dtype: 16-bit type in which modules show float32 parameters in a step; None shows them as they are.
        offload: Shards live in host memory, also those of one replica.
        accumulates_on_host: Gradients are in host memory between the batches of an accumulation window.
        streaming: Blocks whose parameters are not to be in memory before they are sharded, if there are.
    """

    stage: int = 0
    blocks: Sequence[str] = ()
    reduce_dtype: torch.dtype | None = None
    param_dtype: torch.dtype | None = None
    offload: bool = False
    accumulates_on_host: bool = False
    streaming: Streaming | None = None

    def shards(self, mesh: Mesh) -> bool:
        """Whether anything is sharded, moved or shown in another type."""
        return self.param_dtype is not None or (self.stage > 0 and (mesh.layout.data > 1 or self.offload))

    def start(
        self, root: nn.Module, cut: StageCut | None, mesh: Mesh, experts: ExpertParallel | None = None
    ) -> DataParallel:
        """What runs the model until it is sharded."""
        if self.streaming is not None:
            return Streamed(cut, root, mesh, self.streaming, reduce_dtype=self.reduce_dtype)
        split = experts.parameters() if experts is not None else ()
        return Replicated(cut, root, mesh, self.reduce_dtype, self.param_dtype, split)

    def watch(self, root: nn.Module, mesh: Mesh, experts: ExpertParallel | None = None) -> ReadWatch | None:
        """What finds modules that are read past their calls, where that matters."""
        if self.stage < 2 or not self.shards(mesh):
            return None
        beside = outside_modules(root, ancestors_of(self.blocks), set(self.blocks)) if self.stage == 3 else []
        banks = experts.banks if experts is not None else ()
        return ReadWatch(root, [*self.blocks, *beside, *(name for name in banks if name not in beside)])

    def shard(
        self,
        root: nn.Module,
        cut: StageCut | None,
        mesh: Mesh,
        callers: Mapping[str, Sequence[int]],
        reads: ReadWatch | None,
        experts: ExpertParallel | None = None,
    ) -> Sharded:
        """Shard the model in place; all replicas call it together.

        Args:
            root: The model.
            cut: This rank's view of it; None without a pipeline.
            mesh: Groups of this rank.
            callers: Of modules beside the blocks, the stages that call them.
            reads: What the watch has found.
            experts: What expert parallelism has made of the model; None where experts are not split.
        """
        everyone: list[Any] = [set()] * mesh.layout.data
        if reads is not None:
            dist.all_gather_object(everyone, reads.found, group=mesh.data_group)
        excluded = set().union(*everyone)
        units = choose_units(
            root,
            cut,
            self.blocks,
            zero_stage=self.stage,
            callers=callers,
            excluded=excluded,
            group=HEEDS_EACH_CALL,
            banks=experts.banks if experts is not None else (),
        )
        if self.streaming is not None:
            self.streaming.stop()
        sharded = Sharded(
            root,
            mesh,
            units,
            zero_stage=self.stage,
            reduce_dtype=self.reduce_dtype,
            param_dtype=self.param_dtype,
            offload=self.offload,
            fill=self.streaming.materialiser.fill if self.streaming is not None else None,
            experts=experts.splits if experts is not None else (),
        )
        bypass_sharding(root)
        if cut is not None:
            cut.refresh()
        return sharded


def reduction_dtype(
    name: str, dtypes: Collection[torch.dtype], param_dtype: torch.dtype | None = None
) -> torch.dtype | None:
    """Type in which gradients are summed: the one that is named, or for "auto" float32 where parameters have 16 bits.

    Args:
        name: "auto", or a floating-point type of torch.
        dtypes: The parameters' types.
        param_dtype: 16-bit type in which they are shown, and their gradients made.

    Returns:
        None where gradients are summed in their own type.
    """
    if name == "auto" and param_dtype is not None:
        return torch.float32
    if name == "auto":
        return torch.float32 if dtypes and all(dtype.itemsize == 2 for dtype in dtypes) else None
    dtype: torch.dtype = getattr(torch, name)
    return None if dtypes == {dtype} and param_dtype is None else dtype


@contextmanager
def dry_run(root: nn.Module, device: torch.device, reads: ReadWatch) -> Iterator[None]:
    """Context of a step that is watched; the model, its metrics and random streams are as before afterwards."""
    with Snapshot(root, device), uncompiled(), reads:
        yield
