"""How much time a plan takes at least, given its last units: what lets a search leave out the rest."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from lightning_hybrid.functional.mixing_choices import Numbers, Part, Sizes, options, saved_of
from lightning_hybrid.functional.mixing_plan import Unit

Floats = np.ndarray[Any, np.dtype[np.float64]]
NUM_PRICES, NUM_ROOMS = 96, 256


class Bound:
    """What any plan takes at least that ends as a given plan of the last units does.

    Where bytes have a price in time, the cheapest way of a tensor does not depend on those of others, and the cheapest
    plan of the first units is quickly found. A plan without a price saves the price of its bytes at most: a Lagrange
    multiplier. Of many prices, the one counts that gives the most.

    Args:
        units: All units.
        budget: Most bytes.
        in_flight: Micro-batches in flight.
        starts: Units with which a segment must begin.
        ticks_in_second: Unit of time; 0 if time is free, and plans are to take few bytes.

    Attributes:
        sizes: Bytes of segments.
    """

    def __init__(
        self, units: Sequence[Unit], budget: int, in_flight: int, starts: Collection[int], ticks_in_second: float
    ) -> None:
        self.units, self.budget, self.in_flight, self.starts = units, budget, in_flight, frozenset(starts)
        self.ticks_in_second, self.sizes = ticks_in_second, Sizes(units)
        prices = np.geomspace(1e-5, 1e5, NUM_PRICES) * 2.0**50 / max(1, budget)
        # the last is of bytes alone: how few they can be
        self._prices, self._weight = np.append(prices, 1.0), np.append(np.ones(NUM_PRICES), 0.0)
        self._ends = [self._reach(start) for start in range(len(units))]
        self._closed, self._open = self._before()
        self._floor = self._floors()
        rooms = np.linspace(0, budget, NUM_ROOMS)[:, None]
        self._best = {
            is_open: [(row[:-1] - prices * rooms).argmax(axis=1) for row in rows]
            for is_open, rows in ((False, self._closed), (True, self._open))
        }

    def __call__(self, index: int, is_open: bool, ticks: Numbers, held: Numbers) -> Any:
        """Ticks that a plan takes at least, or bytes if time is free; infinite if it cannot keep to the budget.

        Args:
            index: Unit with which the given plans begin.
            is_open: Whether it is recomputed, and the arguments of its segment are still to be stored.
            ticks: Time of the given plans.
            held: Most bytes at once in them.
        """
        row, room = (self._open if is_open else self._closed)[index], self.budget - held
        if not self.ticks_in_second:
            return held + row[-1]
        place = np.clip(room * (NUM_ROOMS - 1) // max(1, self.budget), 0, NUM_ROOMS - 1)
        best = self._best[is_open][index][place]
        floor = 0.0 if is_open else self._floor[index]
        return ticks + np.where(room < row[-1], math.inf, np.maximum(floor, row[best] - self._prices[best] * room))

    def _before(self) -> tuple[list[Floats], list[Floats]]:
        """At each price, the cheapest plan of the units before each, of all plans and of those that recompute the unit.

        In the latter the arguments of its segment count, even if the segment begins with the unit.
        """
        nowhere, passed = np.full(len(self._prices), math.inf), np.zeros(len(self._prices))
        closed, opened = [np.zeros(len(self._prices))], list[Floats]()
        begun = list[Floats]()  # segments from each unit, with their arguments, less `passed`
        for index, unit in enumerate(self.units):
            begun.append(closed[-1] + self._price(unit, "arguments") - passed)
            runs = [value for value, end in zip(begun, self._ends, strict=False) if end > index]
            run = np.min([nowhere, *runs], axis=0)
            opened.append(run + passed)
            passed = passed + self._price(unit, "after") + self._weight * (unit.seconds or 0.0) * self.ticks_in_second
            kept = closed[-1] + self._price(unit, "kept") if self.sizes.kept(index) <= self.budget else nowhere
            closed.append(np.minimum(run + passed, kept))
        return closed, opened

    def _price(self, unit: Unit, part: Part) -> Floats:
        total = np.zeros(len(self._prices))
        for saved in saved_of(unit, part):
            _, ticks, stored, _ = np.array(list(options(saved, self.ticks_in_second))).T
            total += (np.outer(ticks, self._weight) + np.outer(self.in_flight * stored, self._prices)).min(axis=0)
        return total

    def _reach(self, start: int) -> int:
        """Where a recomputed segment that begins there ends at the latest; there if nowhere."""
        for index in range(start, len(self.units)):
            is_cut = self.units[index].seconds is None or (index > start and index in self.starts)
            if is_cut or self._recomputed(start, index + 1) - self.units[index].beside > self.budget:
                return index  # a longer one takes more, but for what is beside its last unit
        return len(self.units)

    def _recomputed(self, start: int, stop: int) -> int:
        return self.sizes.arguments[start] + int(self.sizes.inner(start, np.array(stop)))

    def _floors(self) -> list[float]:
        """Time before each unit that the peaks before it take at least."""
        floors = [0.0]
        for stop in range(1, len(self.units) + 1):
            found, seconds = [self._needed(floors, stop - 1, self.sizes.kept(stop - 1))], 0.0
            for start in (i for i in reversed(range(stop)) if self._ends[i] >= stop):
                seconds += self.units[start].seconds or 0.0
                again = self._needed(floors, start, self._recomputed(start, stop))
                found.append(again + seconds * self.ticks_in_second)
            floors.append(min(found))
        return floors

    def _needed(self, floors: Sequence[float], index: int, raw: int) -> float:
        """Time before a unit at least, if a segment of so many bytes begins with it."""
        row, room = self._closed[index], self.budget - raw
        if room < row[-1]:
            return math.inf
        return max(floors[index], float((row[:-1] - self._prices[:-1] * room).max()))
