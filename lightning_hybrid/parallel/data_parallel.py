"""Data parallelism of one rank's stages: gradients summed once a step, in ZeRO stage 1 with sharded optimizer states.

Torch's `fully_shard` does the sharding. Plain replication does not need it: a few flat all-reduces a step are faster
than its per-module collectives.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_hybrid.parallel.cut import StageCut
from lightning_hybrid.parallel.mesh import Mesh
from lightning_hybrid.parallel.reduction import Reduction
from lightning_hybrid.parallel.run import Result

Backwards = Iterable[tuple[int, int]]
"""(stage, micro-batch) of a step's backward passes on one rank, in order."""


OUTSIDE = -1  # stands for a stage: parameters outside the blocks, final after the very last backward pass


class DataParallel(Protocol):
    """What the runtime asks of data parallelism."""

    def step(self, function: Callable[[], Result]) -> Result:
        """Run one stage once."""

    def begin(self, backwards: Backwards, *, reduce: bool) -> None:
        """Learn the order of the coming backward passes, and whether gradients are reduced after them."""

    def before_backward(self, stage: int, micro_batch: int) -> None:
        """Prepare for one backward pass."""

    def finish(self) -> None:
        """Sum what is left to sum, after the last backward of an accumulation window."""

    def abandon(self) -> None:
        """Leave no trace in the parameters of a step that has failed."""

    def gather(self) -> None:
        """Make all parameters whole, so that forward passes need no collective."""

    def scatter(self) -> None:
        """Let go of whole parameters, so that the next forward pass gathers what the optimizer has changed."""


class Replicated:
    """Every replica holds everything; gradients are summed from the last backward passes of a window on."""

    def __init__(self, cut: StageCut | None, root: nn.Module, mesh: Mesh) -> None:
        self._cut, self._root, self._group = cut, root, mesh.data_group
        self._stages: dict[int, list[nn.Parameter]] = {}
        self._reduction: Reduction | None = None
        self._reduce = False
        self._order: list[tuple[int, int]] = []

    def step(self, function: Callable[[], Result]) -> Result:
        """Run one stage once."""
        return function()

    def begin(self, backwards: Backwards, *, reduce: bool) -> None:
        """The last backward of each stage makes gradients final."""
        self._order, self._index, self._reduce = list(backwards), 0, reduce and self._group.size() > 1
        self._last = {stage: index for index, (stage, _) in enumerate(self._order)}
        if self._reduce:
            self._prepare()

    def before_backward(self, stage: int, micro_batch: int) -> None:
        """Start what the last backward of another stage has left, and look out for what this one makes final."""
        index = self._index
        self._index += 1
        if self._reduction is None or not self._reduce or self._last[stage] != index:
            return
        for other, last in self._last.items():
            if last < index:
                self._reduction.complete(self._stages[other])
        self._reduction.watch(self._stages[stage])
        if index == len(self._order) - 1:
            self._reduction.watch(self._stages[OUTSIDE])

    def finish(self) -> None:
        """Wait for the sums over the replicas."""
        if self._reduction is not None and self._reduce:
            self._reduction.finish()

    def abandon(self) -> None:
        """Watch no backward pass that may follow elsewhere."""
        if self._reduction is not None:
            self._reduction.reset()

    def gather(self) -> None:
        """Everything is whole."""

    def scatter(self) -> None:
        """Everything stays whole."""

    def _prepare(self) -> None:
        """Make the buckets, anew where parameters have been frozen or thawed."""
        stages = self._parameters_of_stages()
        parameters = [parameter for of_stage in stages.values() for parameter in of_stage]
        known = self._reduction.parameters if self._reduction else []
        if len(known) != len(parameters) or any(a is not b for a, b in zip(known, parameters, strict=True)):
            self._reduction = Reduction(parameters, self._group) if parameters else None
        elif self._reduction is not None:
            self._reduction.reset()
        self._stages = stages

    def _parameters_of_stages(self) -> dict[int, list[nn.Parameter]]:
        """The stages from the last to the first, then what lies outside the blocks; in each, the last one first."""
        here = self._cut.stages if self._cut else [0]
        stages: dict[int, list[nn.Parameter]] = {stage: [] for stage in [*sorted(here, reverse=True), OUTSIDE]}
        owner: dict[int, int] = {}
        if self._cut:
            for name, parameter in self._cut.parameters.items():
                mine = self._cut.block_stages.get(name, set())
                if len(mine) == 1 and name not in self._cut.outside:
                    owner[id(parameter)] = next(iter(mine))
        for parameter in reversed(list(self._root.parameters())):
            if parameter.requires_grad:
                stages[owner.get(id(parameter), OUTSIDE if self._cut else 0)].append(parameter)
        return stages


class _Step(nn.Module):
    """What `fully_shard` takes for the root: its forward returns also where the user's step leaves by an exception."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.root = root

    def forward(self, function: Callable[[], Result]) -> tuple[list[Tensor], Any]:
        result = function()
        return result.payload, result.output


class Sharded:
    """Each replica owns a slice of every parameter for the optimizer.

    Parameters stay gathered from a step's first forward to its last backward, which reduces the gradients once.
    """

    def __init__(self, cut: StageCut | None, root: nn.Module, mesh: Mesh) -> None:
        device_mesh = DeviceMesh.from_group(mesh.data_group, mesh.device.type, mesh_dim_names=("data",))
        # its advice is about modules that reshard after forward; ours stay gathered until the last backward
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        self._blocks: dict[int, list[FSDPModule]] = {}
        users = Counter(id(p) for module in root.modules() for p in module.parameters(recurse=False))
        for stage in cut.stages if cut else []:
            assert cut is not None
            blocks = [root.get_submodule(cut.blocks[position]) for position in cut.blocks_of_stage(stage)]
            self._blocks[stage] = [
                fully_shard(block, mesh=device_mesh, reshard_after_forward=False)
                for block in blocks
                # a parameter shared with another module must be in that module's group: the root's
                if any(True for _ in block.parameters()) and all(users[id(p)] == 1 for p in block.parameters())
            ]
        step = _Step(root)
        self._root: Any = fully_shard(step, mesh=device_mesh, reshard_after_forward=False)
        self._modules = [module for module in step.modules() if isinstance(module, FSDPModule)]
        for module in self._modules:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            # none but itself, which is gathered: by default a module gathers what ran before it, and that differs
            # between replicas if only one of them has probed a new shape
            module.set_modules_to_backward_prefetch([module])
        self._last: dict[int, int] = {}
        self._reduce = False
        self._order: list[tuple[int, int]] = []

    def step(self, function: Callable[[], Result]) -> Result:
        """Run one stage once, inside the root's hooks."""
        payload, output = self._root(function)
        return Result(payload, output)

    def begin(self, backwards: Backwards, *, reduce: bool) -> None:
        """The last backward of each stage, and the very last for the root, reduces and lets go of whole parameters."""
        self._order, self._reduce = list(backwards), reduce
        self._last = {stage: index for index, (stage, _) in enumerate(self._order)}
        self._index = 0

    def before_backward(self, stage: int, micro_batch: int) -> None:
        """Switch the reduction on for last backward passes."""
        index = self._index
        assert self._order[index] == (stage, micro_batch), "backward passes run in the order that begin() was told"
        self._index += 1
        for other, blocks in self._blocks.items():
            last = self._reduce and index >= self._last[other]
            for block in blocks:
                _set_last(block, last=last)
        last = self._reduce and index == len(self._order) - 1
        _set_last(self._root, last=last)
        self._root.set_is_last_backward(last)

    def finish(self) -> None:
        """The backward passes have reduced everything."""

    def abandon(self) -> None:
        """The parameters stay sharded."""

    def gather(self) -> None:
        """Gather the parameters of all modules."""
        for module in self._modules:
            module.unshard()

    def scatter(self) -> None:
        """Free the gathered parameters of all modules."""
        for module in self._modules:
            module.reshard()


def _set_last(module: FSDPModule, *, last: bool) -> None:
    module.set_requires_gradient_sync(last, recurse=False)
    module.set_reshard_after_backward(last, recurse=False)


def broadcast_value(tensor: Tensor, source: int, group: Any = None) -> None:
    """Give all ranks of a group the value of one, whatever the tensor's strides: gloo would ignore them.

    Args:
        tensor: Written in place; an expanded tensor, whose elements share memory, is left alone.
        source: World rank that has the value.
        group: The ranks; None for all.
    """
    if 0 in tensor.stride():
        return
    whole = tensor.detach().contiguous()
    raw = whole.view(-1).view(torch.uint8) if whole.numel() else whole  # bytes: not every backend knows every type
    dist.broadcast(raw, source, group=group)
    if whole.data_ptr() != tensor.data_ptr():
        tensor.copy_(whole)
