"""What the runtime asks of data parallelism, and the answer of plain replication; `sharding.py` has that of ZeRO.

Plain replication does not need `fully_shard`: a few flat all-reduces a step are faster than its per-module collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.parallel.checkpoint.places import Place, on_parameter
from lightning_hybrid.parallel.gradients import sum_gradients
from lightning_hybrid.parallel.mesh import Mesh, Peers
from lightning_hybrid.parallel.pipeline.cut import StageCut
from lightning_hybrid.parallel.pipeline.run import Result
from lightning_hybrid.parallel.reduction import Reduction
from lightning_hybrid.parallel.zero.narrow import shown_as

Backwards = Iterable[tuple[int, int]]
"""(stage, micro-batch) of a step's backward passes on one rank, in order."""


OUTSIDE = -1  # stands for a stage: parameters outside the blocks, final after the very last backward pass


class DataParallel(Protocol):
    """What the runtime asks of data parallelism."""

    def step(self, function: Callable[[], Result]) -> Result:
        """Run one stage once."""

    def shown(self) -> AbstractContextManager[None]:
        """Context in which modules show parameters as a step sees them, entered around probes and steps."""

    def begin(self, backwards: Backwards, *, reduce: bool, hold: bool = False) -> None:
        """Learn the order of the coming backward passes.

        Args:
            backwards: They.
            reduce: Their gradients are summed over the replicas, with all that has accumulated.
            hold: The accumulation window goes on after them, with the same parameters.
        """

    def before_backward(self, stage: int, micro_batch: int) -> None:
        """Prepare for one backward pass."""

    def finish(self) -> None:
        """Sum what is left to sum, after the last backward of an accumulation window."""

    def abandon(self) -> None:
        """Leave no trace in the parameters of a step that has failed."""

    def restart(self) -> None:
        """Let go of what a run has gathered that ended within a step or a window; all replicas call it together."""

    def held_parameters(self) -> list[nn.Parameter]:
        """All parameters that may have gradients."""

    def leaf(self, parameter: nn.Parameter) -> nn.Parameter:
        """What backward passes give a parameter's gradient to."""

    def places(self, name: str, parameter: nn.Parameter) -> list[Place]:
        """Where a parameter's gradient may be between two batches of a window; the first takes what fits no other."""

    def unused_parameters(self) -> set[str]:
        """Names of parameters that have zeros, as no replica has used them in this window; all call it together."""

    def note_used(self, names: Iterable[str]) -> None:
        """Learn names of parameters that have got a gradient in a window that goes on."""

    def gather(self) -> None:
        """Make all parameters whole, so that forward passes need no collective."""

    def scatter(self) -> None:
        """Let go of whole parameters, so that the next forward pass gathers what the optimizer has changed."""

    def whole(self) -> AbstractContextManager[None]:
        """Context in which all parameters are whole; all replicas enter it together."""

    def apart(self, number: int, *, wanted: bool) -> AbstractContextManager[None]:
        """Context in which replicas may run different forward passes, and other numbers of them."""


class Replicated:
    """Every replica holds everything; gradients are summed from the last backward passes of a window on.

    Args:
        cut: This rank's view of the model; None without a pipeline.
        root: The model.
        mesh: Groups of this rank.
        reduce_dtype: Type in which gradients are summed; None takes each parameter's own.
        param_dtype: 16-bit type in which modules show float32 parameters while a step runs; it will not be trained
            before `Sharded` takes over.
        experts: Parameters of experts that are split over the data axis: fewer ranks have the same.
    """

    def __init__(
        self,
        cut: StageCut | None,
        root: nn.Module,
        mesh: Mesh,
        reduce_dtype: torch.dtype | None = None,
        param_dtype: torch.dtype | None = None,
        experts: Collection[nn.Parameter] = (),
    ) -> None:
        self._cut, self._root, self._mesh, self._dtype = cut, root, mesh, reduce_dtype
        self._param_dtype, self._experts = param_dtype, set(experts)
        self._stages: dict[int, list[nn.Parameter]] = {}
        self._reductions: list[Reduction] = []
        self._reduce = False
        self._order: list[tuple[int, int]] = []

    def step(self, function: Callable[[], Result]) -> Result:
        """Run one stage once."""
        return function()

    def shown(self) -> AbstractContextManager[None]:
        """Context with copies of 16 bits where they are asked for."""
        return nullcontext() if self._param_dtype is None else shown_as(self._root, self._param_dtype)

    def begin(self, backwards: Backwards, *, reduce: bool, hold: bool = False) -> None:
        """The last backward of each stage makes gradients final."""
        self._order, self._index, self._reduce = list(backwards), 0, reduce and self._mesh.layout.data > 1
        self._last = {stage: index for index, (stage, _) in enumerate(self._order)}
        if self._reduce:
            self._prepare()

    def before_backward(self, stage: int, micro_batch: int) -> None:
        """Start what the last backward of another stage has left, and look out for what this one makes final."""
        index = self._index
        self._index += 1
        if not self._reduce or self._last[stage] != index:
            return
        for reduction in self._reductions:
            for other, last in self._last.items():
                if last < index:
                    reduction.complete(self._stages[other])
            reduction.watch(self._stages[stage])
            if index == len(self._order) - 1:
                reduction.watch(self._stages[OUTSIDE])

    def finish(self) -> None:
        """Wait for the sums over the replicas."""
        if not self._reduce:
            return
        known = set[nn.Parameter]()
        for reduction in self._reductions:
            reduction.finish()
            known.update(reduction.parameters)
        # those that were frozen since the window began
        others = [p for p in self._root.parameters() if p.requires_grad and p not in known]
        for peers, parameters in self._by_peers(others):
            sum_gradients(parameters, peers.group, at_least=self._dtype)

    def abandon(self) -> None:
        """Watch no backward pass that may follow elsewhere."""
        for reduction in self._reductions:
            reduction.reset()

    def restart(self) -> None:
        """Nothing is gathered."""

    def held_parameters(self) -> list[nn.Parameter]:
        """Those of the model."""
        return list(self._root.parameters())

    def leaf(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter itself."""
        return parameter

    def places(self, name: str, parameter: nn.Parameter) -> list[Place]:
        """Each replica has its own."""
        peers = self._mesh.experts if parameter in self._experts else self._mesh.dense
        return [on_parameter(parameter, "data", peers.rank, peers.size)]

    def unused_parameters(self) -> set[str]:
        """None of them has a gradient."""
        return set()

    def note_used(self, names: Iterable[str]) -> None:
        """Gradients tell."""

    def gather(self) -> None:
        """Everything is whole."""

    def scatter(self) -> None:
        """Everything stays whole."""

    def whole(self) -> AbstractContextManager[None]:
        """Everything is."""
        return nullcontext()

    def apart(self, number: int, *, wanted: bool) -> AbstractContextManager[None]:
        """They always may."""
        return nullcontext()

    def _prepare(self) -> None:
        """Make the buckets, anew where parameters have been frozen or thawed."""
        stages = self._parameters_of_stages()
        parameters = [parameter for of_stage in stages.values() for parameter in of_stage]
        known = [parameter for reduction in self._reductions for parameter in reduction.parameters]
        wanted = [(peers, some) for peers, some in self._by_peers(parameters) if some and peers.size > 1]
        ordered = [parameter for _, of_peers in wanted for parameter in of_peers]
        if len(known) != len(ordered) or any(a is not b for a, b in zip(known, ordered, strict=True)):
            self._reductions = [Reduction(of_peers, peers.group, self._dtype) for peers, of_peers in wanted]
        else:
            for reduction in self._reductions:
                reduction.reset()
        self._stages = stages

    def _by_peers(self, parameters: Sequence[nn.Parameter]) -> list[tuple[Peers, list[nn.Parameter]]]:
        """Parameters of experts are summed over others than the rest."""
        rest = [parameter for parameter in parameters if parameter not in self._experts]
        mine = [parameter for parameter in parameters if parameter in self._experts]
        return [(self._mesh.dense, rest), (self._mesh.experts, mine)]

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


def broadcast_value(tensor: Tensor, source: int, group: Any = None) -> None:
    """Give all ranks of a group the value of one, whatever the tensor's strides: gloo would ignore them.

    Args:
        tensor: Written in place; an expanded tensor, whose elements share memory, is left alone.
        source: World rank that has the value.
        group: The ranks; None for all.
    """
    if 0 in tensor.stride():
        return
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    raw = whole.view(-1).view(torch.uint8) if whole.numel() else whole  # bytes: not every backend knows every type
    dist.broadcast(raw, source, group=group)
    if whole.data_ptr() != tensor.data_ptr():
        tensor.copy_(whole)


@torch.no_grad()
def broadcast_whole(module: nn.Module, device: torch.device) -> None:
    """Start from the weights of world rank 0, as one process would; what is on the meta device is made later.

    Args:
        module: Whole on every rank, changed in place.
        device: Where the group communicates.
    """
    if dist.get_world_size() == 1:
        return
    for tensor in (t for t in [*module.parameters(), *module.buffers()] if not t.is_meta):
        on_device = tensor.to(device)
        broadcast_value(on_device, 0)
        if on_device is not tensor:
            tensor.copy_(on_device)


def maxima(mesh: Mesh, *numbers: int) -> list[int]:
    """The largest value of each number over the replicas, which call it together."""
    tensor = torch.tensor(numbers, device=mesh.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=mesh.data_group)
    largest: list[int] = tensor.tolist()
    return largest


def broadcast_buffers(root: nn.Module, mesh: Mesh) -> None:
    """Give all replicas the buffers of the first."""
    if mesh.layout.data > 1:
        with torch.no_grad():
            for buffer in root.buffers():
                broadcast_value(buffer, mesh.data_ranks[0], mesh.data_group)
