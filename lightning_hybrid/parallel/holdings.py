"""What one rank holds of the model: parameters by name, shards and slices of them, and who counts which in a norm."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_hybrid.functional.splits import Split
from lightning_hybrid.optim.wholes import Dealing
from lightning_hybrid.parallel.checkpoint.places import Place
from lightning_hybrid.parallel.data_parallel import DataParallel
from lightning_hybrid.parallel.experts.parallel import ExpertParallel
from lightning_hybrid.parallel.gradients import sum_gradients, take_gradients
from lightning_hybrid.parallel.group_axis import GroupAxis
from lightning_hybrid.parallel.mesh import Mesh, Peers
from lightning_hybrid.parallel.pipeline.cut import StageCut
from lightning_hybrid.parallel.pipeline.ownership import Ownership, settle
from lightning_hybrid.parallel.pipeline.plan import Needs
from lightning_hybrid.parallel.tensor.parallel import TensorParallel
from lightning_hybrid.parallel.zero.accumulation import HostAccumulation
from lightning_hybrid.parallel.zero.sharding import Sharded
from lightning_hybrid.parallel.zero.zero import Zero


class Share(NamedTuple):
    """What one of several ranks has of a tensor.

    Attributes:
        split: How it is dealt out.
        size: Number of ranks.
        rank: Which of them this is.
    """

    split: Split
    size: int
    rank: int


def part_of(tensor: TensorParallel | None, experts: ExpertParallel | None, name: str, whole: Any) -> Any:
    """What a rank has of a whole value of a parameter over the tensor axis, or over the expert axis."""
    whole = whole if tensor is None else tensor.part(name, whole)
    return whole if experts is None else experts.part(name, whole)


class Holdings:
    """The part of the model that is on this rank; it shrinks once, when it is known who reads what.

    Args:
        root: The model, already cut.
        cut: The cut; None on a pipeline of one stage.
        mesh: Groups of this rank.
        zero: How states are sharded over the data axis.
        tensor: What tensor parallelism has made of the model; None on a tensor axis of one rank.
        experts: What expert parallelism has made of it; None where experts are not split.

    Attributes:
        data: Gathers parameters and sums gradients over the replicas.
        ownership: Who has what outside the blocks; None before `settle`.
        accumulation: Keeps gradients between the batches of a window in host memory, if that is asked for.
        in_window: Gradients of earlier batches wait for more; false behind a step that has failed among them.
        reads: Finds modules that are read past their calls; None where that does not matter, and after `settle`.
    """

    def __init__(
        self,
        root: nn.Module,
        cut: StageCut | None,
        mesh: Mesh,
        zero: Zero,
        tensor: TensorParallel | None,
        experts: ExpertParallel | None,
    ) -> None:
        self.root, self.cut, self.mesh, self.zero, self.tensor, self.experts = root, cut, mesh, zero, tensor, experts
        self.data: DataParallel = zero.start(root, cut, mesh, experts)
        self.ownership: Ownership | None = None
        self.accumulation = HostAccumulation() if zero.accumulates_on_host else None
        self.reads = zero.watch(root, mesh, experts)
        self._whole: dict[str, nn.Parameter] | None = None
        self.in_window = False
        self._trained = set[nn.Parameter]()  # those that may have got gradients in this window

    @property
    def is_partial(self) -> bool:
        """Whether this rank has only some of the parameters, or slices or shards of them."""
        split = self.tensor is not None or self.experts is not None
        return self.cut is not None or split or isinstance(self.data, Sharded)

    @property
    def stand_ins(self) -> Collection[str]:
        """Names of parameters that other stages have, and something empty stands for here."""
        return self.cut.stand_ins if self.cut is not None else ()

    def keep(self, needs: Mapping[int, Needs]) -> Ownership | None:
        """Keep what this rank's stages read, sharded over the data axis.

        Args:
            needs: Of each stage of this rank, what it reads outside the blocks.

        Returns:
            The new ownership, or None if it had been settled before.
        """
        if self.ownership is not None:
            return None
        if self.cut is not None:
            self.ownership = settle(self.cut, self.mesh, dict(needs))
        else:
            self.ownership = Ownership({name: (0,) for name, _ in self.root.named_parameters()}, {}, {}, {}, [])
        if self.zero.shards(self.mesh):
            callers = self.ownership.callers
            self.data = self.zero.shard(self.root, self.cut, self.mesh, callers, self.reads, self.experts)
        self.reads = None
        self._whole = dict(self.root.named_parameters())
        return self.ownership

    def forget_gradients(self) -> None:
        """Drop what an accumulation window has left that was never applied."""
        self.in_window = False
        take_gradients(self.local_parameters())
        self._trained.clear()
        self.data.abandon()
        if self.accumulation is not None:
            self.accumulation.forget()

    def window_places(self) -> dict[str, list[Place]]:
        """Of each parameter, where its gradient may be between two batches of a window."""
        named = self.named_parameters()
        if self.accumulation is not None:
            return {name: [self.accumulation.place(parameter)] for name, parameter in named.items()}
        return {name: self.data.places(name, parameter) for name, parameter in named.items()}

    def unused_parameters(self) -> set[str]:
        """Names of parameters that have zeros, as no replica has used them in this window; all call it together."""
        return set() if self.accumulation is not None else self.data.unused_parameters()

    def resume_window(self, names: Collection[str]) -> None:
        """Go on with a window whose gradients have been put into `window_places`.

        Args:
            names: Parameters that have one on any rank.
        """
        self.in_window = True
        self._trained.update(p for name, p in self.named_parameters().items() if name in names)
        if self.accumulation is None:
            self.data.note_used(names)

    def note_trained(self) -> None:
        """Learn which parameters a batch gives gradients to; some may be frozen before the window ends."""
        self._trained.update(p for p in self.local_parameters() if p.requires_grad)

    @contextmanager
    def thawed(self) -> Iterator[None]:
        """Context of a window's sums: what was frozen within the window has gradients too."""
        frozen = [parameter for parameter in self._trained if not parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
            self._trained.clear()

    def local_parameters(self) -> list[nn.Parameter]:
        """The parameters that are on this rank, in the model's order."""
        return self.data.held_parameters()

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The same by name, shared ones once."""
        if self.cut is not None:
            return self.cut.parameters
        return dict(self.root.named_parameters()) if self._whole is None else self._whole

    def peers(self, name: str) -> Peers:
        """Ranks that have a parameter, or shards of it, from other samples' point of view."""
        is_split = self.experts is not None and name in self.experts.splits
        return self.mesh.experts if is_split else self.mesh.dense

    def share(self, name: str) -> Share | None:
        """How a parameter is dealt out to ranks that each have something else of it; None if it is not."""
        if self.tensor is not None and name in self.tensor.splits:
            return Share(self.tensor.splits[name], self.tensor.axis.size, self.tensor.axis.rank)
        if self.experts is not None and name in self.experts.splits:
            return Share(self.experts.splits[name], self.experts.size, self.experts.rank)
        return None

    def dealings(self) -> dict[Tensor, list[Dealing]]:
        """Parameters that an axis deals out as plain tensors, for optimizers that look at wholes."""
        found: dict[Tensor, list[Dealing]] = {}
        for parallel, group in ((self.tensor, self.mesh.tensor_group), (self.experts, self.mesh.expert_group)):
            if parallel is not None and group is not None:
                axis, splits = GroupAxis(group, self.mesh.device), parallel.splits
                named = ((p, splits[name]) for name, p in self.named_parameters().items() if name in splits)
                found |= {parameter: [Dealing(split.dim, axis, split.length)] for parameter, split in named}
        return found

    def deals_out(self, name: str, parameter: Tensor, value: Any, collapsed: frozenset[int] = frozenset()) -> bool:
        """Whether an axis deals out a value as it does its parameter.

        Args:
            name: The parameter's.
            parameter: As it is here.
            value: A state of it.
            collapsed: Dimensions of the parameter that have length 1 in the value.
        """
        share = self.share(name)
        if share is None or not isinstance(value, Tensor):
            return False
        return share.split.dim not in collapsed if collapsed else value.shape == parameter.shape

    def part(self, name: str, whole: Any) -> Any:
        """This rank's share of a whole value of a parameter, or of an optimizer's state of the same shape."""
        return part_of(self.tensor, self.experts, name, whole)

    def counted_parameters(self) -> list[nn.Parameter]:
        """Those that this rank counts in a norm: over the world, each parameter, slice or shard of one exactly once."""
        return [parameter for name, parameter in self.named_parameters().items() if self._counts(name)]

    def deferred_parameters(self) -> list[nn.Parameter]:
        """Whole parameters of which each rank of the tensor axis has a part of the gradient only."""
        deferred = self.tensor.deferred if self.tensor is not None else frozenset[str]()
        return [p for name, p in self.named_parameters().items() if name in deferred and p.requires_grad]

    def sum_deferred_gradients(self) -> None:
        """Sum over the tensor axis what `deferred_parameters` have, in at least float32; its ranks call it together."""
        if self.tensor is not None:
            group, device = self.mesh.tensor_group, self.mesh.device
            sum_gradients(self.deferred_parameters(), group, at_least=torch.float32, device=device)

    def _counts(self, name: str) -> bool:
        is_sharded, peers = isinstance(self.data, Sharded) and name in self.data.sharded, self.peers(name)
        if (peers.copy if is_sharded else peers.rank) > 0:
            return False
        is_split = self.tensor is not None and name in self.tensor.splits
        owns = self.ownership is None or self.cut is None or self.ownership.owner(name) == self.mesh.pipeline_rank
        return owns and (is_split or self.mesh.tensor_rank == 0)
