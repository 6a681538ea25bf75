"""ZeRO by torch's `fully_shard` under any schedule: what is gathered, summed and let go of before, in and after passes.

| stage | parameters are whole | gradients are summed and sharded |
|---|---|---|
| 1 | from a step's first forward to the last backward of its window | by the last backward passes of a window |
| 2 | likewise | by every backward pass |
| 3 | while a unit's forward, and then its backward, runs | by every backward pass |

`fully_shard` expects that all replicas call the same modules in the same order. So what it would find out on the way is
said here beforehand: which units the next backward pass belongs to, which of them it makes final, what to prefetch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_hybrid.compat import free_early
from lightning_hybrid.parallel.checkpoint.places import Place, on_parameter
from lightning_hybrid.parallel.data_parallel import Backwards, maxima
from lightning_hybrid.parallel.gradients import sum_gradients
from lightning_hybrid.parallel.mesh import Mesh
from lightning_hybrid.parallel.pipeline.run import Result
from lightning_hybrid.parallel.zero.aliasing import alias_shards
from lightning_hybrid.parallel.zero.calls import Calls
from lightning_hybrid.parallel.zero.twins import Twins
from lightning_hybrid.parallel.zero.units import Unit, loose_parameters
from lightning_hybrid.parallel.zero.waiting import complete_waiting, drop_waiting, waiting_gradients
from lightning_hybrid.parallel.zero.windows import places_of_copy, places_of_replica
from lightning_hybrid.parallel.zero.wrappers import configure, shard_all, sharding_functions


class Sharded:
    """Each rank of a group of replicas owns a slice of every parameter, with its gradient and optimizer state.

    Args:
        root: The model; it is changed in place.
        mesh: Groups of this rank; `replicate` of them may each hold all slices (arXiv:2304.11277, section 3.2.2).
        units: What is gathered together; the rest of the model travels in buckets, which nobody calls.
        zero_stage: 1, 2 or 3 (arXiv:1910.02054, section 5).
        reduce_dtype: Type in which gradients are summed and kept until then; None takes the parameters'.
        param_dtype: Type in which modules show float32 parameters while they are gathered; None leaves them.
        offload: Slices and their gradients live in host memory.
        fill: Makes slices that are on the meta device.
        experts: Names of parameters of experts that are split over the data axis: fewer ranks have slices of the same.

    Attributes:
        loose: Parameters that `fully_shard` cannot slice: every replica has them whole.
        units: What is gathered together.
        modules: One of each unit, and buckets of what is in none.
    """

    def __init__(
        self,
        root: nn.Module,
        mesh: Mesh,
        units: Sequence[Unit] = (),
        *,
        zero_stage: int = 1,
        reduce_dtype: torch.dtype | None = None,
        param_dtype: torch.dtype | None = None,
        offload: bool = False,
        fill: Callable[[], None] | None = None,
        experts: Collection[str] = (),
    ) -> None:
        # its advice is heeded by `shard_unit`, where modules reshard after forward
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        self._mesh, self._zero_stage, self._reduce_dtype = mesh, zero_stage, reduce_dtype
        loose = loose_parameters(root, torch.float32 if param_dtype else None)
        shard, shard_experts = sharding_functions(
            mesh, zero_stage=zero_stage, dtypes=(param_dtype, reduce_dtype), offload=offload, experts=bool(experts)
        )
        self._experts, self._calls, self._twins = frozenset(experts), Calls(), Twins()
        self.units = list(units)
        for unit in units:
            self._calls.watch(root.get_submodule(name) for name in unit.names)
        held = shard_all(root, units, loose, self._experts, shard, shard_experts, for_moments=zero_stage == 3)
        self._units, self._buckets, self._root = held
        self.modules = [*(module for _, module in self._units), *self._buckets]
        free_early(self._root)
        self._fills, on_host = hasattr(self._root, "set_reduce_scatter_unused_params"), mesh.device.type == "cpu"
        configure(self._units, self._buckets, zero_stage=zero_stage, fills=self._fills, on_host=on_host)
        if fill is not None:
            fill()
        present = dict(root.named_parameters())
        self.loose = [present[name] for name in loose]
        self._loose_experts = {present[name] for name in loose if name in experts}
        self.sharded = {name: p for name, p in present.items() if isinstance(p, DTensor)}
        self._present = set[str]()  # names of those that have got a gradient in this window
        self._order: list[tuple[int, int]] = []
        self._is_gathered = self._reduce = self._hold = False
        self._initialise(root)
        if zero_stage < 3 and not offload:
            for module in self.modules:
                alias_shards(module)

    def step(self, function: Callable[[], Result]) -> Result:
        """Run one stage once, inside the root's hooks."""
        payload, output = self._root(self._gather_buckets, function)
        if self._zero_stage == 3 and not self._is_gathered:
            for bucket in self._buckets:
                bucket.reshard()
        return Result(payload, output)

    def shown(self) -> AbstractContextManager[None]:
        """What is gathered is so already."""
        return nullcontext()

    def begin(self, backwards: Backwards, *, reduce: bool, hold: bool = False) -> None:
        """Learn which backward pass is the last of each unit: it makes the unit's gradients final."""
        self._order, self._reduce, self._hold, self._index = list(backwards), reduce, hold, 0
        last = {stage: index for index, (stage, _) in enumerate(self._order)}
        self._last = [max(last.get(stage, -1) for stage in unit.stages) for unit, _ in self._units]
        self._calls.clear()
        self._twins.agree()

    def before_backward(self, stage: int, micro_batch: int) -> None:
        """Say of each unit whether this pass sums its gradients, and lets go of its parameters."""
        index = self._index
        assert self._order[index] == (stage, micro_batch), "backward passes run in the order that begin() was told"
        self._index += 1
        for (unit, module), last in zip(self._units, self._last, strict=True):
            self._set(module, runs=stage in unit.stages, left=last - index)
        left = len(self._order) - 1 - index
        for bucket in self._buckets:
            self._set(bucket, runs=True, left=left)
        self._gather_buckets()
        self._root.set_is_last_backward(self._reduce and left == 0)

    def finish(self) -> None:
        """Take back the zeros of parameters that no replica has used, and sum what is not sharded.

        Raises:
            RuntimeError: If the replicas' steps called different units, and so mixed up their parameters.
        """
        if not self._hold:
            for module in self.modules:
                module.reshard()  # those that no backward pass has reached: the user may thaw their parameters now
        trained = {name: p for name, p in self.sharded.items() if p.requires_grad}
        mine = [*(name in self._present for name in trained), *self._calls.digest()]
        counts = torch.tensor(mine, dtype=torch.int64, device=self._mesh.device)
        dist.all_reduce(counts, group=self._mesh.data_group)
        *present, total, squares = counts.tolist()
        if self._zero_stage > 1:
            self._calls.check([total, squares], self._mesh.data_group.size(), self._zero_stage)
        has_zeros = self._fills or self._reduce_dtype is not None
        for parameter, replicas in zip(trained.values(), present, strict=True):
            if has_zeros and not replicas:
                parameter.grad = None
        self._present.clear()
        for peers, split in ((self._mesh.dense, False), (self._mesh.experts, True)):
            loose = [p for p in self.loose if p.requires_grad and (p in self._loose_experts) == split]
            sum_gradients(loose, peers.group, at_least=self._reduce_dtype)

    def abandon(self) -> None:
        """Drop the gradients of a window that will not be applied; the parameters stay sharded."""
        self._present.clear()
        drop_waiting(self.modules)

    def restart(self) -> None:
        """Shard what a step has left whole that an exception ended, or a window that was not finished."""
        self.scatter()
        reset = getattr(self._root, "reset_iter_state", self._root.state_dict)  # older torch: that shards, at least
        reset()

    def waiting_gradients(self) -> list[Tensor]:
        """Gradients that are whole and in the type of their sum, on none of `held_parameters`."""
        return waiting_gradients(self.modules)

    def held_parameters(self) -> list[nn.Parameter]:
        """All that may have gradients: the slices, and what modules show in their place while it is whole."""
        return [*self.sharded.values(), *self._twins.whole, *self.loose]

    def leaf(self, parameter: nn.Parameter) -> nn.Parameter:
        """The whole parameter that modules show in a shard's place."""
        return self._twins.leaf(parameter)

    def places(self, name: str, parameter: nn.Parameter) -> list[Place]:
        """On shards what is summed; before that whole in stage 1, and with copies of shards in the sums of each."""
        peers = self._mesh.experts if name in self._experts else self._mesh.dense
        if name not in self.sharded:
            return [on_parameter(parameter, "data", peers.rank, peers.size)]
        places = [on_parameter(parameter, "all")]
        if self._zero_stage == 1:
            whole = self._twins.whole_of(parameter)
            places += places_of_replica(parameter, whole, self.modules, peers, self._reduce_dtype)
        elif self._fills and peers.replicate > 1:
            places += places_of_copy(parameter, self.modules, peers, self._reduce_dtype)
        return places

    def unused_parameters(self) -> set[str]:
        """Those that have zeros because others that travel with them have gradients."""
        counts = torch.tensor([name in self._present for name in self.sharded], dtype=torch.int32)
        counts = counts.to(self._mesh.device)
        dist.all_reduce(counts, group=self._mesh.data_group)
        return {name for name, replicas in zip(self.sharded, counts.tolist(), strict=True) if not replicas}

    def note_used(self, names: Iterable[str]) -> None:
        """At the window's end they keep what they have got."""
        self._present.update(self.sharded.keys() & set(names))

    def gather(self) -> None:
        """Make all parameters whole until `scatter`: forward passes then need no collective."""
        self._is_gathered = True
        if self._zero_stage == 3:
            self._root.set_reshard_after_forward(False)
        for module in self.modules:
            module.unshard()

    def scatter(self) -> None:
        """Free the gathered parameters."""
        self._is_gathered = False
        for module in self.modules:
            module.reshard()
        if self._zero_stage == 3:
            self._root.set_reshard_after_forward(True)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Context in which all parameters are whole."""
        if self._is_gathered:
            yield
            return
        self.gather()
        try:
            yield
        finally:
            self.scatter()

    @contextmanager
    def apart(self, number: int, *, wanted: bool) -> Iterator[None]:
        """Context in which replicas may run different forward passes; all of them enter it together.

        Args:
            number: Passes that this replica is going to run.
            wanted: It may run others besides.
        """
        apart = False
        if self._zero_stage == 3 and not self._is_gathered:
            least, most, any_wants = maxima(self._mesh, -number, number, int(wanted))
            apart = bool(any_wants) or -least != most
        with self.whole() if apart else nullcontext():
            yield

    def _gather_buckets(self) -> None:
        """Make whole what belongs to no unit; nobody calls a bucket."""
        for bucket in self._buckets:
            bucket.unshard()

    def _set(self, module: FSDPModule, *, runs: bool, left: int) -> None:
        """Prepare one unit for the next backward pass.

        Args:
            module: The unit.
            runs: The pass may give it gradients.
            left: Passes from this one to its last; below 0 behind that.
        """
        last = self._reduce and left == 0
        if last and self._reduce_dtype is not None:
            complete_waiting(module, self._reduce_dtype)
        module.set_requires_gradient_sync(runs and (self._zero_stage > 1 or last), recurse=False)
        if self._zero_stage > 1 and self._fills:  # copies of slices are summed once, like all of stage 1
            module.set_requires_all_reduce(last, recurse=False)
        is_done = self._reduce and not self._hold and left <= 0
        module.set_reshard_after_backward(self._zero_stage == 3 or is_done, recurse=False)

    def _initialise(self, root: nn.Module) -> None:
        """Gather each unit once, to watch the whole parameters that `fully_shard` keeps for good.

        All of them count as trainable while it takes note of their types: some may be thawed later.
        """
        frozen = [p for p in self.sharded.values() if not p.requires_grad and p.is_floating_point()]
        for shard in frozen:
            shard.requires_grad_(True)
        with torch.no_grad():
            self._root(lambda: None, lambda: Result([], None))
            self._root.reshard()
            for module in self.modules:
                module.unshard()
                for name, parameter in root.named_parameters():
                    if name in self.sharded and not isinstance(parameter, DTensor) and parameter.requires_grad:
                        parameter.register_post_accumulate_grad_hook(partial(_note, self._present, name))
                        self._twins.add(self.sharded[name], parameter)
                module.reshard()
        for shard in frozen:
            shard.requires_grad_(False)
        self._twins.agree()


def _note(present: set[str], name: str, _: Tensor) -> None:
    """A hook; it knows no model, as Python's garbage collector does not look into hooks on tensors."""
    present.add(name)
