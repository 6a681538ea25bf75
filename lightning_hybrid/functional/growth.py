"""Batches that grow where learning rates would fall: sizes, what is left for the rate, and who takes which part.

The noise of SGD has the scale ``g = eps (N / B - 1)``, about ``eps N / B``, with the learning rate ``eps``, the batch
``B`` and the training set ``N``; with momentum ``m`` it is ``g = eps N / (B (1 - m))``. Source: Smith et al. 2018,
arXiv:1711.00489, sections 2 to 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import gcd
from typing import NamedTuple

SLACK = 1e-9  # of a ratio that is whole but for rounding


class Level(NamedTuple):
    """One level of growth.

    Attributes:
        batch: Samples of one step over all replicas.
        rate: What the learning rate is multiplied by.
    """

    batch: int
    rate: float


class Shares(NamedTuple):
    """How a global batch is shared out: accumulate x merged x replicas loader batches.

    Attributes:
        accumulate: Runs of a replica in one step.
        merged: Loader batches of one run.
        replicas: Data replicas.
    """

    accumulate: int
    merged: int
    replicas: int


class Plateau(NamedTuple):
    """What is known of a monitored value.

    Attributes:
        best: The best so far; None before the first.
        waited: How many since then, or since the last growth, were no better.
        grown: How often it has stopped to improve.
    """

    best: float | None = None
    waited: int = 0
    grown: int = 0


def noise_scale(rate: float, batch: float, size: float, momentum: float = 0.0) -> float:
    """``g = eps N / (B (1 - m))``.

    Args:
        rate: Learning rate eps.
        batch: Batch B of a step over all replicas.
        size: Training set N, in the unit of the batch.
        momentum: Momentum m, below 1.

    Source: Smith et al. 2018, arXiv:1711.00489, section 4.
    """
    return rate * size / (batch * (1 - momentum))


def level_at(base: int, quantum: int, product: float, cap: float | None = None) -> Level:
    """The level at which the noise scale is the first one's divided by `product`.

    The batch takes as much of it as it can, in whole quanta and up to the cap, and the rate takes the rest: their
    ``rate / batch`` is that of the first level divided by `product`.

    Args:
        base: Samples of a step at the first level, whole quanta.
        quantum: Samples that a batch may grow by: a loader batch of all replicas.
        product: All factors so far, at least 1.
        cap: Most samples, at least `base`; None has no limit.

    Source: Smith et al. 2018, arXiv:1711.00489, section 3 for the batch in place of the rate; section 5.1 for a rate
        that decays when the batch cannot grow.
    """
    wanted = base * product
    top = wanted if cap is None else min(wanted, cap)
    batch = math.floor(top / quantum * (1 + SLACK)) * quantum
    return Level(batch, batch / wanted)


def levels(base: int, quantum: int, factors: Sequence[float], cap: float | None = None) -> list[Level]:
    """All levels, the first with its own batch and a rate of 1; see `level_at`."""
    products = accumulate(factors, lambda product, factor: product * factor, initial=1.0)
    return [level_at(base, quantum, product, cap) for product in products]


def is_whole(ratio: float) -> bool:
    """Whether a ratio is a whole number, but for rounding."""
    return abs(ratio - round(ratio)) <= SLACK * ratio


def share_out(
    batches: int,
    replicas: int,
    max_accumulate: int | None = None,
    max_microbatches: int | None = None,
    max_replicas: int | None = None,
) -> Shares:
    """How the loader batches of one step are shared out over accumulation, longer runs and more replicas.

    Accumulation takes up to `max_accumulate`, what is left goes to longer runs of a replica up to `max_microbatches`,
    and then to more replicas up to `max_replicas`. Whatever does not fit falls back to accumulation. The three always
    multiply to `batches`.

    Args:
        batches: Loader batches of one replica in one step of all.
        replicas: Those that there are.
        max_accumulate: None sets no limit.
        max_microbatches: Most loader batches in one run; None is 1.
        max_replicas: None is those that there are.

    Raises:
        ValueError: If no number of replicas that may be had divides the batches.
    """
    fitting = [each for each in range(replicas, max(replicas, max_replicas or 0) + 1) if batches % each == 0]
    if not fitting:
        raise ValueError(f"{batches} batches cannot be dealt out to {replicas} replicas, each as many.")
    found = []
    for number in fitting:
        rest = batches // number
        for merged in range(1, min(rest, max_microbatches or 1) + 1):
            if rest % merged == 0:
                over = max(0, rest // merged - (max_accumulate or rest))
                found.append((over, number, merged, Shares(rest // merged, merged, number)))
    return min(found)[-1]


def observe(plateau: Plateau, value: float, patience: int, min_delta: float = 0.0, mode: str = "min") -> Plateau:
    """Hear of a monitored value: whether it has stopped to improve, for `patience` values in a row.

    A value is better if it is so by more than `min_delta`; one that is not a number is not. `ReduceLROnPlateau` was
    considered for this: it needs an optimizer, whose rate it changes.

    Args:
        plateau: What is known so far.
        value: The next value.
        patience: How many values in a row are no better, at least 1.
        min_delta: What counts as better, at least 0.
        mode: "min" or "max".
    """
    sign = 1.0 if mode == "min" else -1.0
    limit = math.inf if plateau.best is None else sign * plateau.best - min_delta
    if sign * value < limit:
        return Plateau(value, 0, plateau.grown)
    waited = plateau.waited + 1
    return Plateau(plateau.best, waited % patience, plateau.grown + (waited >= patience))


def growth_of(decays: Mapping[int, float]) -> dict[int, float]:
    """Factors of the batch that take the place of a schedule's decays.

    Args:
        decays: Factor of the first rate, by the milestone from which on a schedule has it.

    Returns:
        Factor at each milestone, in order.

    Raises:
        ValueError: If a rate is not finite, is 0 or does not fall.
    """
    growth, before = {}, 1.0
    for milestone, factor in sorted(decays.items()):
        if not 0 < factor < before:
            raise ValueError(
                f"The schedule has a rate of {factor} times the first from milestone {milestone} on, and of {before} "
                "before. A batch grows only where a rate falls, to more than 0: give factors of the first rate."
            )
        growth[milestone], before = before / factor, factor
    return growth


def step_decays(milestones: Sequence[int], gamma: float) -> dict[int, float]:
    """Factors of the first rate of `MultiStepLR`; equal milestones count each.

    Args:
        milestones: Where the rate falls.
        gamma: Its factor each time.
    """
    return {milestone: gamma**number for number, milestone in enumerate(sorted(milestones), start=1)}


def nodes_to_add(batches: Sequence[int], replicas: int, nodes: int, wanted: int, waiting: int) -> int:
    """How many of the nodes that wait a run takes in: as many as it can use.

    Args:
        batches: Loader batches of one replica in a step of all, at the present level and at those to come.
        replicas: Those that there are.
        nodes: Nodes that they are on, all alike.
        wanted: Most replicas that are wanted.
        waiting: Nodes that wait.
    """
    least, common = nodes + 1, gcd(*batches)
    return max(0, usable_nodes(common, replicas, nodes, nodes + waiting, least=least, most=wanted) - nodes)


def usable_nodes(
    batches: int, replicas: int, nodes: int, present: int, *, least: int = 1, most: int | None = None
) -> int:
    """On how many of the present nodes replicas can share the batches of a step; 0 if on none.

    Args:
        batches: Loader batches of one replica in a step of all, or a common divisor of several.
        replicas: Of a run on `nodes` nodes, all alike.
        nodes: Its nodes.
        present: Nodes that there are now.
        least: Fewest nodes.
        most: Most replicas; None sets no limit.
    """
    for number in range(present, least - 1, -1):
        count, rest = divmod(replicas * number, nodes)
        if count and not rest and count <= (most or count) and batches % count == 0:
            return number
    return 0
