"""One plan over several callbacks that save memory: which of them takes what, so that all keep to one budget."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.table import Table
from typing_extensions import override

from lightning_hybrid.callbacks.blocks import choose_groups, first_blocks
from lightning_hybrid.callbacks.reports import fail_together, is_logging_step, log_bytes, show
from lightning_hybrid.functional.mixing_plan import (
    MIX_COLUMNS,
    Mix,
    mix_bytes,
    mix_peak_bytes,
    mix_rows,
    mix_seconds,
    mix_stored_bytes,
)
from lightning_hybrid.functional.mixing_room import cheapest_mix_with_room, units_with_room
from lightning_hybrid.parallel.ledgers.traffic import over_ranks
from lightning_hybrid.parallel.memory.compression import Compression
from lightning_hybrid.parallel.memory.costs import CostMeter
from lightning_hybrid.parallel.memory.keys import SavedKeys
from lightning_hybrid.parallel.memory.mixed import MixedChoice, MixMeter, StoredWatch, seconds_to_copy
from lightning_hybrid.parallel.memory.mixed_items import Measured, Units, units_of
from lightning_hybrid.parallel.memory.offload import Offload
from lightning_hybrid.parallel.memory.recompute import Recomputation

MEASURED_STEPS = 2
"""The first step also warms up, and its times are long."""


class MemoryTechnique(Callback):
    """A callback whose technique can be one of several in a plan; hooks of derived classes call these last.

    Attributes:
        budget_bytes: Most bytes, or None.
        blocks: Names of the lists of blocks, or None.
        joint: After `setup`, the policy that plans for it with others; None if it plans for itself, or not at all.
        plans_alone: Whether it has a plan of its own for a budget when no other technique is there.
    """

    budget_bytes: int | None
    blocks: str | Sequence[str] | None
    joint: MemoryPolicy | None = None
    plans_alone: ClassVar[bool] = True

    @property
    def runtime(self) -> Recomputation | Offload | Compression:
        """What does it, from `on_fit_start` on."""
        raise NotImplementedError

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        techniques = _techniques(trainer)
        policy = MemoryPolicy.of(techniques)
        for technique in techniques:  # the one that is set up last makes it for all
            technique.joint = policy

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.joint is not None and self._is_last(trainer):
            self.joint.begin(trainer, pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.joint is not None and self._is_last(trainer):
            self.joint.start()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.joint is not None and self._is_last(trainer):
            self.joint.stop()
            self.joint.batch_ended(trainer, pl_module)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.joint is not None:
            self.joint.stop()  # a hook may have skipped the rest of the epoch in the middle of a batch

    def leave_batch(self, trainer: Trainer) -> None:
        """See `callback_states.leave_batch`."""
        if self.joint is not None:
            self.joint.stop()

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.joint is not None:
            self.joint.close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self.joint is not None:
            self.joint.close()

    def _is_last(self, trainer: Trainer) -> bool:
        """Whether the others' hooks have run, so that it may run those of the policy."""
        return self is _techniques(trainer)[-1]


def _techniques(trainer: Trainer) -> list[MemoryTechnique]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, MemoryTechnique)]


class MemoryPolicy:
    """Plans for several techniques together; it has no budget of its own, but that of one of them.

    The first two steps hold as little as they can, and measure. Then the cheapest plan that keeps to the budget decides
    of each block whether it is recomputed, and of each saved tensor whether it is kept, compressed or offloaded.

    Args:
        techniques: The callbacks.
        budget_bytes: Most bytes that the device is to hold for backward on a rank, of all micro-batches in flight.

    Attributes:
        budget_bytes: As given.
        measured: What the plan was made from: of this rank, and of those that have the same blocks.
        units: What the plan is about.
        mix: The plan, once there is one.
        totals: Of the plan, on the rank with the most: bytes of a micro-batch that are kept, recomputed, offloaded and
            compressed, and seconds that it adds to its step.
    """

    def __init__(self, techniques: Sequence[MemoryTechnique], budget_bytes: int) -> None:
        self._techniques, self.budget_bytes = list(techniques), budget_bytes
        self.measured, self.totals = Measured(), dict[str, float]()
        self.mix: Mix | None = None
        self.units = Units([], [], [])
        self._keys: SavedKeys | None = None
        self._meter: MixMeter | None = None
        self._steps = 0
        self._recomputation: Recomputation | None = None
        self._offload: Offload | None = None
        self._compression: Compression | None = None
        self._watch: StoredWatch | None = None

    @staticmethod
    def of(techniques: Sequence[MemoryTechnique]) -> MemoryPolicy | None:
        """The policy of a Trainer's callbacks, if they have a budget that none of them keeps to by itself.

        Raises:
            ValueError: If they have different budgets, or different blocks.
        """
        budgets = {type(t).__name__: t.budget_bytes for t in techniques if t.budget_bytes is not None}
        if not budgets or (len(techniques) == 1 and techniques[0].plans_alone):
            return None
        if len(set(budgets.values())) > 1:
            raise ValueError(
                f"{_listed(budgets, 'budget_bytes')}: one plan over these callbacks keeps to one budget. Give it to "
                "one of them."
            )
        blocks = {type(technique).__name__: technique.blocks for technique in techniques}
        if len({names if isinstance(names, str | None) else tuple(names) for names in blocks.values()}) > 1:
            raise ValueError(
                f"{_listed(blocks, 'blocks')}: one plan over these callbacks is about the same blocks. Give all of "
                "them the same."
            )
        return MemoryPolicy(techniques, next(iter(budgets.values())))

    def begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A fit starts, and all techniques are there."""
        self.close()
        self.measured, self.mix, self.totals, self._steps = Measured(), None, {}, 0
        self._watch = None
        device, blocks = trainer.strategy.root_device, self._techniques[0].blocks
        self._keys = SavedKeys(pl_module, choose_groups(trainer, pl_module, blocks), device)
        runtimes = [technique.runtime for technique in self._techniques]
        self._recomputation = next((one for one in runtimes if isinstance(one, Recomputation)), None)
        self._offload = next((one for one in runtimes if isinstance(one, Offload)), None)
        self._compression = next((one for one in runtimes if isinstance(one, Compression)), None)
        sites = [] if self._recomputation is None else self._recomputation.sites
        costs = CostMeter(pl_module, sites, device) if sites else None
        self._meter = MixMeter(self._keys, costs, sites, self._offload, self._compression, device)
        if self._recomputation is not None:
            self._recomputation.observer = self._meter

    def start(self) -> None:
        """A batch begins."""
        assert self._keys is not None
        self._keys.start()
        if self._meter is not None:
            self._meter.start()

    def stop(self) -> None:
        """A batch is over."""
        if self._keys is not None:
            self._keys.stop()

    def batch_ended(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After each batch: plan, and log."""
        if self._meter is not None:
            self._steps += 1
            if self._steps == MEASURED_STEPS:
                self._decide(trainer, self._meter)
                show(trainer, self.table())
        elif self._watch is not None:
            self._check_stored(trainer, self._watch)
        if self.totals and is_logging_step(trainer):
            for name, value in self.totals.items():
                log_bytes(pl_module, f"memory_policy/{name}", value)

    def _check_stored(self, trainer: Trainer, watch: StoredWatch) -> None:
        """Warn once if so much more is held than the plan counts on that the budget may not be kept to."""
        assert self.mix is not None
        units, in_flight, found = self.units.units, self.measured.in_flight, watch.take()
        planned = mix_stored_bytes(units, self.mix)
        room = self.budget_bytes - mix_peak_bytes(units_with_room(units, self.mix), self.mix, in_flight)
        lacking = in_flight * (found - planned) - room
        if lacking > 0:
            self._watch = None
            warnings.warn(
                f"Rank {trainer.global_rank} holds {found:,} bytes of a micro-batch for backward, and the plan for "
                f"budget_bytes={self.budget_bytes} counts on {planned:,}: shapes differ from those of the first "
                f"{MEASURED_STEPS} steps, or what is compressed has fewer zeros. Allow {lacking:,} bytes more for such "
                "steps, or begin with the largest.",
                stacklevel=2,
            )

    def close(self) -> None:
        """Leave the modules as they were."""
        if self._keys is not None:
            self._keys.close()
        self._keys = self._meter = None

    def table(self) -> Table:
        """The plan of this rank."""
        assert self.mix is not None
        table = Table(
            title=f"Activations of this rank within {self.budget_bytes:,} bytes, by micro-batch; up to "
            f"{self.measured.in_flight} in flight"
        )
        for index, column in enumerate(MIX_COLUMNS):
            table.add_column(column, justify="left" if not index else "right")
        for row in mix_rows(self.units.names, self.units.units, self.mix):
            table.add_row(*row)
        return table

    def _decide(self, trainer: Trainer, meter: MixMeter) -> None:
        """Make a plan, the same on all ranks that run the same blocks; they call it together."""
        self._meter = None
        if self._recomputation is not None:
            self._recomputation.observer = None
        mine = meter.finish(0.0 if self._offload is None else seconds_to_copy(trainer.strategy.root_device))
        for rank, other in enumerate(over_ranks(mine)):
            if rank == trainer.global_rank or mine.blocks & other.blocks:
                self.measured.add(other)
        self.units, error = units_of(self.measured), ""
        try:
            starts = self._starts(trainer, self.units.names)
            self.mix = cheapest_mix_with_room(self.units.units, self.budget_bytes, self.measured.in_flight, starts)
        except ValueError as failure:
            error = str(failure)
        fail_together(error)
        # the search calculates with floats, of which processors of several kinds may make different plans
        plans = over_ranks((self.units, self.mix))
        self.mix = next(mix for units, mix in plans if units == self.units)
        assert self.mix is not None
        assert self._keys is not None
        self._apply(self.mix, self._keys)
        totals = mix_bytes(self.units.units, self.mix) | {"extra_seconds": mix_seconds(self.units.units, self.mix)}
        of_ranks = over_ranks(totals)
        self.totals = {name: max(of_rank[name] for of_rank in of_ranks) for name in totals}

    def _starts(self, trainer: Trainer, names: list[str]) -> set[int]:
        """Units with which a recomputed segment must begin: those of blocks that do not follow the one before."""
        if self._recomputation is None:
            return set()
        places = {site.name: place for place, site in enumerate(self._recomputation.sites)}
        blocks = [name for name in names if name in places]
        starts = {blocks[index] for index in first_blocks(trainer, blocks)}
        starts |= {b for a, b in pairwise(blocks) if places[b] != places[a] + 1 or b in self.measured.starts}
        return {names.index(name) for name in starts}

    def _apply(self, mix: Mix, keys: SavedKeys) -> None:
        if self._recomputation is not None:
            place_of = {site.name: place for place, site in enumerate(self._recomputation.sites)}
            segments: list[int | None] = list(range(len(place_of)))  # a block that has not run yet may still
            for number, segment in enumerate(mix.segments):
                for name in self.units.names[segment.start : segment.stop]:
                    if name in place_of:
                        segments[place_of[name]] = len(place_of) + number if segment.recomputed else None
            self._recomputation.segments = segments
        choice = MixedChoice(keys, self.units.ways(mix))
        self._watch = StoredWatch(keys, choice, self._offload, self._compression)


def _listed(values: dict[str, Any], name: str) -> str:
    return " and ".join(f"{callback}({name}={value!r})" for callback, value in values.items())
