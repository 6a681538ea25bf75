"""How far a growing run is: what it began with, which level it has reached, and what comes next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from lightning_hybrid.functional.growth import SLACK, Level, Plateau, is_whole, level_at, observe


@dataclass(frozen=True)
class GrowthPlan:
    """When a batch grows, and by what; without milestones it does at plateaus.

    Attributes:
        milestones: Factor at each, in epochs or applied steps, in order.
        factor: At each plateau.
        max_batch: Largest batch of a step, in units.
        may_round: Whether a batch that is no whole number of loader batches is rounded down, and the rate takes the
            rest; otherwise the first may not be.
    """

    milestones: Mapping[int, float]
    factor: float
    max_batch: int | None
    may_round: bool = False

    @property
    def has_plateaus(self) -> bool:
        """Whether a monitored value says when."""
        return not self.milestones

    def product(self, level: int) -> float:
        """All factors up to a level."""
        return prod([*self.milestones.values()][:level]) if self.milestones else self.factor**level

    def reached(self, now: int) -> int:
        """Milestones up to now."""
        return sum(milestone <= now for milestone in self.milestones)


@dataclass
class GrowthProgress:
    """What a checkpoint keeps, as plain numbers.

    Attributes:
        base: Samples of a step over all replicas at level 0; 0 until they are known.
        quantum: Samples of a loader batch of all replicas when the run began.
        loader_batch: Samples of such a batch now; 0 if it is not known.
        tokens: Tokens of the first batch; 0 where samples count.
        samples: Samples of that batch.
        level: The one under way.
        first_step: Applied steps of the optimizer when the run began.
        best: Of the monitored value; None before the first.
        waited: How many values since were no better.
        grown: Plateaus so far.
    """

    base: int = 0
    quantum: int = 0
    loader_batch: int = 0
    tokens: int = 0
    samples: int = 1
    level: int = 0
    first_step: int = 0
    best: float | None = None
    waited: int = 0
    grown: int = 0

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    def observe(self, value: float, patience: int, min_delta: float, mode: str) -> None:
        """Hear of the monitored value."""
        before = Plateau(self.best, self.waited, self.grown)
        self.best, self.waited, self.grown = observe(before, value, patience, min_delta, mode)

    @property
    def units(self) -> float:
        """What a sample counts: its tokens, or 1."""
        return self.tokens / self.samples if self.tokens else 1.0

    def at(self, plan: GrowthPlan, level: int) -> Level:
        """Samples and rate of a level."""
        cap = None if plan.max_batch is None else plan.max_batch / self.units
        return level_at(self.base, self.quantum, plan.product(level), cap)

    def to_come(self, plan: GrowthPlan) -> list[Level]:
        """The present level and all later ones; with plateaus to the first at which the batch is as large as can be."""
        last = max(self.level, len(plan.milestones))
        while plan.has_plateaus and self.base * self.units * plan.product(last) < (plan.max_batch or 0):
            last += 1
        return [self.at(plan, level) for level in range(self.level, last + 1)]

    def windows(self, plan: GrowthPlan) -> list[int]:
        """Loader batches of all replicas in a step of each of these levels."""
        return [each.batch // self.loader_batch for each in self.to_come(plan)]

    def next_level(self, due: int, fits: Callable[[int], bool]) -> int:
        """The furthest level that is due and whose windows can begin here; the present one if there is none."""
        return next((level for level in range(due, self.level, -1) if fits(level)), self.level)


def check_levels(progress: GrowthProgress, plan: GrowthPlan, num_batches: float) -> None:
    """Refuse levels that cannot be.

    Args:
        progress: What the run began with.
        plan: What is to come.
        num_batches: Such batches of an epoch.

    Raises:
        ValueError: With the sizes.
    """
    _check_first(progress, plan)
    loader_batch = progress.loader_batch
    for batch, _ in progress.to_come(plan):
        if batch % loader_batch:
            raise ValueError(
                f"BatchSizeGrowth: a batch of {batch} samples is no whole number of loader batches of all replicas, "
                f"{loader_batch} samples each. Choose a batch size or a number of replicas with which it is one."
            )
        if batch // loader_batch > num_batches:
            raise ValueError(
                f"BatchSizeGrowth: a batch of {batch} samples is more than an epoch has, {num_batches} x "
                f"{loader_batch}. Set a smaller max_batch."
            )


def _check_first(progress: GrowthProgress, plan: GrowthPlan) -> None:
    base, quantum, units = progress.base, progress.quantum, progress.units
    if plan.max_batch is not None and base * units > plan.max_batch * (1 + SLACK):
        raise ValueError(
            f"BatchSizeGrowth(max_batch={plan.max_batch}): the batch begins with {base * units:g} already. Give a "
            "larger max_batch, or begin with a smaller batch."
        )
    wanted = base * plan.product(1)
    is_capped = plan.max_batch is not None and wanted * units >= plan.max_batch
    if not (plan.may_round or is_capped or is_whole(wanted / quantum)):
        raise ValueError(
            f"BatchSizeGrowth: the first growth, from {base} samples by {plan.product(1):g}, would give {wanted:g}, "
            f"which is no whole number of loader batches of all replicas, {quantum} samples each. Choose a factor or a "
            "batch size with which it is one."
        )
