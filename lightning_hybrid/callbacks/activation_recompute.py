"""Recompute activations in the backward pass instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from rich.table import Table
from typing_extensions import override

from lightning_hybrid.callbacks.activation_offload import ActivationOffload
from lightning_hybrid.callbacks.arguments import check_whole
from lightning_hybrid.callbacks.blocks import choose_blocks, first_blocks
from lightning_hybrid.callbacks.memory_policy import MemoryTechnique
from lightning_hybrid.callbacks.reports import fail_together, show
from lightning_hybrid.functional.recomputation import cheapest_segments, square_root_segments
from lightning_hybrid.functional.segments import PLAN_COLUMNS, BlockCost, Segment, plan_rows
from lightning_hybrid.parallel.ledgers.traffic import over_ranks
from lightning_hybrid.parallel.memory.calls import Order, surround
from lightning_hybrid.parallel.memory.costs import CostMeter, merged
from lightning_hybrid.parallel.memory.frames import Site
from lightning_hybrid.parallel.memory.partitioned import Partition
from lightning_hybrid.parallel.memory.recompute import Recomputation
from lightning_hybrid.parallel.memory.selective import PRODUCTS, Selective, check_operations

Policy = Literal["full", "sqrt", "selective"]
POLICIES = ("full", "sqrt", "selective")
MEASURED_STEPS = {"sqrt": 1, "budget": 2}
"""The first step also warms up, and its times are long."""


class ActivationRecompute(MemoryTechnique):
    """Drops what blocks save for backward and runs them again there, with any strategy but FSDP's and DeepSpeed's.

    Gradients are those without it, to the bit: random numbers (torch's, Python's, NumPy's, and of generators that are
    attributes of modules) are drawn again, buffers and attributes such as counters change once, modes and autocast
    stand as they did. Hooks on blocks run once, those of modules inside them twice.

    Policies:

    - "full": every block keeps its arguments alone (Chen et al. 2016, arXiv:1604.06174).
    - "sqrt": segments of blocks keep the first one's arguments alone, so that the sum of these and of the largest
      segment is least (section 3 there); unequal blocks are measured in the first step, which runs as "full".
    - "selective": results of products and attention are kept, by torch's selective-checkpoint contexts. A block that
      writes to such a result in place is an error in its backward pass.
    - `budget_bytes`: of all plans that keep to the budget the one that takes the least time again, by bytes and times
      measured in the first two steps, which run as "full". The plan is printed.

    Args:
        policy: One of these; None is "full", or by the budget if there is one.
        budget_bytes: Most bytes that blocks of a rank may hold for backward, of all micro-batches in flight. With
            ActivationOffload or ActivationCompression in the Trainer it is for all that a rank holds, and one plan is
            made over all of them, whichever has the budget.
        blocks: Dotted names of the lists whose elements are recomputed; None finds them.
        keep: Operations whose results "selective" keeps, such as "aten.mm"; None is products, convolutions, attention.
        partition_over_tensor_axis: Each rank of the tensor axis keeps a part of the arguments, in memory set aside for
            it, and they are gathered before they are used again (arXiv:1910.02054, sections 6.1 and 6.3).

    Attributes:
        costs: By block of this rank, what was measured.
        plan: Segments of the blocks of this rank, once there is a plan.

    Raises:
        ValueError: If arguments are out of range or do not go together; before training, if there are no blocks or the
            strategy has its own recomputation; after the measurement, on all ranks, if no plan keeps to the budget.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        budget_bytes: int | None = None,
        blocks: str | Sequence[str] | None = None,
        keep: Sequence[str] | None = None,
        partition_over_tensor_axis: bool = False,
    ) -> None:
        if policy is not None and policy not in POLICIES:
            raise ValueError(f"policy={policy!r} is none of {POLICIES}.")
        if budget_bytes is not None:
            check_whole("budget_bytes", budget_bytes, 1, " of bytes")
            if policy is not None:
                raise ValueError(
                    f"budget_bytes={budget_bytes} with policy={policy!r}: a budget is a policy of its own. Leave one "
                    "out."
                )
        keep = [keep] if isinstance(keep, str) else keep
        if keep is not None and policy != "selective":
            raise ValueError(f"keep={list(keep)} says what policy='selective' keeps, and policy is {policy!r}.")
        self.policy: str = "budget" if budget_bytes is not None else policy or "full"
        self.budget_bytes, self.blocks = budget_bytes, blocks
        self._given_policy = policy
        self._contexts = Selective(check_operations(keep or PRODUCTS)) if policy == "selective" else None
        self.partition_over_tensor_axis = partition_over_tensor_axis
        self.costs: dict[str, BlockCost] = {}
        self.plan: list[Segment] = []
        self._remove: list[Callable[[], None]] = []
        self._partition: Partition | None = None
        self._meter: CostMeter | None = None
        self._steps, self._in_flight = 0, 1

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        number = sum(isinstance(callback, ActivationRecompute) for callback in callbacks)
        if number > 1:
            raise ValueError(
                f"The Trainer has {number} ActivationRecomputes, and a block is recomputed once. Keep one."
            )
        if isinstance(trainer.strategy, FSDPStrategy | DeepSpeedStrategy):
            raise ValueError(
                f"ActivationRecompute cannot run blocks again under {type(trainer.strategy).__name__}, whose hooks on "
                "modules gather parameters. Use that strategy's own activation checkpointing, or hybrid_zero3."
            )
        if self.partition_over_tensor_axis and any(isinstance(callback, ActivationOffload) for callback in callbacks):
            raise ValueError(
                "partition_over_tensor_axis=True keeps parts of arguments on the device, which ActivationOffload moves "
                "to the host whole: together the device would hold more. Keep one of them."
            )
        if self.partition_over_tensor_axis and not hasattr(type(trainer.strategy), "tensor_group"):
            raise _no_axis(trainer)
        super().setup(trainer, pl_module, stage)
        if self.joint is not None:
            self._check_joint(self.joint.budget_bytes)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave()
        modules = choose_blocks(trainer, pl_module, self.blocks)
        if not modules:
            raise ValueError(
                f"ActivationRecompute found no list of blocks in {type(pl_module).__name__}: no nn.ModuleList or "
                "nn.Sequential with parameters. Name lists whose elements it should recompute with blocks=[...]."
            )
        saving: dict[str, Any] = {}
        if self.partition_over_tensor_axis:
            group = trainer.strategy.tensor_group  # type: ignore[attr-defined]
            if group is None:
                raise _no_axis(trainer)
            self._partition = Partition(group)
            saving["saving"] = self._partition.saving
        device = trainer.strategy.root_device
        sites = [Site(name, module, device) for name, module in modules.items()]
        self._recomputation = Recomputation(sites, self._contexts, **saving)
        self._remove = [
            surround(site.module, Order.RECOMPUTE, self._recomputation.layer(position))
            for position, site in enumerate(sites)
        ]
        self.costs, self.plan, self._steps = {}, [], 0
        if self.policy in MEASURED_STEPS and self.joint is None:
            self._meter = CostMeter(pl_module, sites, device)
            self._recomputation.observer = self._meter
        super().on_fit_start(trainer, pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._meter is not None:
            self._meter.start()
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._partition is not None:
            self._partition.buffers.settle()
        if self._meter is not None:
            self._steps += 1
            if self._steps == MEASURED_STEPS[self.policy]:
                meter, self._meter = self._meter, None
                self._recomputation.observer = None
                self._decide(trainer, meter)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._leave()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._leave()

    @property
    @override
    def runtime(self) -> Recomputation:
        return self._recomputation

    def _check_joint(self, budget_bytes: int) -> None:
        """Refuse what a plan over several callbacks cannot take into account."""
        wrong = f"policy={self._given_policy!r}" if self._given_policy is not None else ""
        wrong = "partition_over_tensor_axis=True" if self.partition_over_tensor_axis else wrong
        if wrong:
            raise ValueError(
                f"budget_bytes={budget_bytes} with ActivationRecompute({wrong}): one plan over several callbacks "
                f"decides which blocks are recomputed, and what becomes of their arguments. Leave {wrong} out."
            )

    def _decide(self, trainer: Trainer, meter: CostMeter) -> None:
        """Make a plan, the same on all ranks that run the same blocks; they call it together."""
        names = [site.name for site in self._recomputation.sites]
        measured = {name: cost for name, cost in zip(names, meter.costs, strict=True) if cost is not None}
        # a replica may have skipped a block that another has run, and a rank may have none of the blocks
        peers = [
            (costs, number) for costs, number in over_ranks((measured, meter.in_flight)) if costs.keys() & measured
        ]
        found = {name: merged([costs.get(name) for costs, _ in peers]) for name in names}
        self.costs = {name: cost for name, cost in found.items() if cost is not None}
        self._in_flight = max((number for _, number in peers), default=1)
        costs, error = list(self.costs.values()), ""
        starts = first_blocks(trainer, list(self.costs))
        try:
            if self.policy == "sqrt":
                self.plan = square_root_segments(costs, starts)
            else:
                assert self.budget_bytes is not None
                self.plan = cheapest_segments(costs, self.budget_bytes, self._in_flight, starts)
        except ValueError as failure:
            error = str(failure)
        fail_together(error)
        self._apply(names)
        show(trainer, self.table())

    def _apply(self, names: list[str]) -> None:
        segments: list[int | None] = list(range(len(names)))
        mine = [names.index(name) for name in self.costs]
        for segment in self.plan:
            for block in range(segment.start, segment.stop):
                segments[mine[block]] = mine[segment.start] if segment.recomputed else None
        self._recomputation.segments = segments

    def table(self) -> Table:
        """The plan of this rank."""
        title = "Recomputed segments" if self.budget_bytes is None else f"Recomputed within {self.budget_bytes:,} bytes"
        title += f" on this rank, by micro-batch; up to {self._in_flight} in flight"
        table = Table(title=title)
        for index, column in enumerate(PLAN_COLUMNS):
            table.add_column(column, justify="left" if index < 2 else "right")
        for row in plan_rows(list(self.costs), list(self.costs.values()), self.plan):
            table.add_row(*row)
        return table

    def _leave(self) -> None:
        for remove in self._remove:
            remove()
        self._remove, self._meter, self._partition = [], None, None


def _no_axis(trainer: Trainer) -> ValueError:
    return ValueError(
        f"partition_over_tensor_axis=True deals arguments out over a tensor axis, of which "
        f"{type(trainer.strategy).__name__} has none here. Use HybridPTDPStrategy(tensor_parallel_size=...) "
        "with 2 or more, or leave it False."
    )
