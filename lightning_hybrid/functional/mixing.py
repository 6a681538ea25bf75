"""Which saved tensors are kept, recomputed, offloaded or compressed: the cheapest plan under a budget of bytes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from lightning_hybrid.functional.mixing_bounds import Bound
from lightning_hybrid.functional.mixing_choices import (
    Choices,
    Numbers,
    Part,
    Step,
    choices,
    mix_of,
    saved_of,
    unsurpassed,
)
from lightning_hybrid.functional.mixing_plan import Mix, Unit, check_units, mix_peak_bytes

MOST = (64, 256, 1024)
"""Most states before each unit, and most ways to store a part of a unit; the next number is for when there are more."""
MOST_OF_BYTES = 4096
"""Most ways to store a part of a unit where time is free: there are fewer that matter."""
STEPS = 12_000_000
"""Most steps from state to state that a search may be expected to take; it then takes a few seconds at most."""


def smallest_mix_budget(units: Sequence[Unit], in_flight: int = 1, starts: Collection[int] = ()) -> int:
    """Fewest bytes that any plan can do with, as :func:`cheapest_mix` finds them.

    Args:
        units: All units, in the order in which they run.
        in_flight: As in :func:`mix_peak_bytes`.
        starts: Units with which a recomputed segment must begin.

    Raises:
        ValueError: If a cost is negative or not finite, or `in_flight` is below 1.
    """
    return mix_peak_bytes(units, _smallest(units, in_flight, starts), in_flight)


def cheapest_mix(units: Sequence[Unit], budget_bytes: int, in_flight: int = 1, starts: Collection[int] = ()) -> Mix:
    """Recompute, move and compress what takes the least time, such that no more than a budget is held at once.

    Where nothing can be moved or compressed and no code stands behind blocks, plans take as long as those of
    `cheapest_segments`. Where blocks cannot be recomputed nor anything compressed, and copies take time by their bytes,
    no more bytes are moved than with `cheapest_offload`; fewer, if a part of a unit is enough, which moves as a whole
    there.

    Args:
        units: All units, in the order in which they run.
        budget_bytes: Most bytes, of all micro-batches in flight together.
        in_flight: As in :func:`mix_peak_bytes`.
        starts: Units with which a recomputed segment must begin.

    Returns:
        The plan with the least :func:`mix_seconds` among those whose :func:`mix_peak_bytes` keep to the budget, with
        the fewest bytes among equals. It is exact as long as few states are left that no other surpasses in bytes and
        time, and that could still be better than a plan at hand: for a few units of some tensors, or some dozen of
        equal tensors. Where there are more, the least promising are dropped, for each of several amounts of bytes held,
        never the one with the fewest: the plan may then take some percent longer than the best, but there is one
        whenever the budget is at least :func:`smallest_mix_budget`, and it keeps to the budget.

    Raises:
        ValueError: If no plan keeps to the budget (the smallest possible is named), a cost is negative or not finite,
            or `in_flight` is below 1.
    """
    smallest = _smallest(units, in_flight, starts)
    needed = mix_peak_bytes(units, smallest, in_flight)
    if needed > budget_bytes:
        raise ValueError(
            f"budget_bytes={budget_bytes}: the activations of {len(units)} blocks, with {in_flight} micro-batch(es) in "
            f"flight, take at least {needed} bytes, whatever is recomputed, moved or compressed. Allow {needed} or "
            f"more, or use smaller micro-batches."
        )
    budget = min(budget_bytes, _most(units, in_flight))
    return _improved(Bound(units, budget, in_flight, starts, _ticks_in_second(units)), smallest)


def _smallest(units: Sequence[Unit], in_flight: int, starts: Collection[int]) -> Mix:
    """A plan with the fewest bytes: the best where time is free."""
    check_units(units)
    if in_flight < 1:
        raise ValueError(f"in_flight={in_flight}: at least one micro-batch is under way.")
    found = _improved(Bound(units, _most(units, in_flight), in_flight, starts, 0.0), None)
    assert found is not None
    return found


def _most(units: Sequence[Unit], in_flight: int) -> int:
    """Bytes that no plan can exceed."""
    total = sum(saved.num_bytes for unit in units for saved in (*unit.arguments, *unit.internal, *unit.after))
    return in_flight * total + max((unit.beside for unit in units), default=0)


def _ticks_in_second(units: Sequence[Unit]) -> float:
    """A power of two, such that all times together are at most 2^50 whole ticks."""
    saved = [s for unit in units for s in (*unit.arguments, *unit.internal, *unit.after)]
    longest = [max(s.compress_seconds, s.offload_seconds or 0.0) for s in saved]
    total = sum(longest) + sum(unit.seconds or 0.0 for unit in units)
    return 2.0 ** (50 - math.frexp(max(total, 1e-9))[1])


def _improved(bound: Bound, mix: Any) -> Any:
    """The best plan, given another or none: searched with more and more states."""
    limit: float = math.inf
    tensors = sum(len(saved_of(unit, "kept")) for unit in set(bound.units))
    for states, wider in pairwise((*MOST, MOST[-1])):
        search = _Search(bound, states, states if bound.ticks_in_second else MOST_OF_BYTES)
        found = search.best(limit)
        if found is not None:
            limit, mix = found
        # choices grow with each tensor, by the ways of it, and take some steps each to compare
        if search.complete or search.steps * (wider // states) ** 2 + 12 * wider * tensors > STEPS:
            break
    return mix


@dataclass(frozen=True)
class _States:
    """Plans of the last units, an array each of their time and bytes.

    Attributes:
        ticks: Time.
        stored: Bytes stored of one micro-batch.
        held: Most bytes at once, of all micro-batches in flight, without what units before store and move.
        raw: Bytes of the first segment while it runs; if it is open, without its arguments.
        stop: Where the first segment ends.
        links: Of each, its first step and the plan behind it.
        is_open: Whether the first segments are recomputed, and their arguments still to be stored, of this unit or one
            before.
    """

    ticks: Numbers
    stored: Numbers
    held: Numbers
    raw: Numbers
    stop: Numbers
    links: Sequence[Any]
    is_open: bool

    def take(self, index: Numbers, links: Sequence[Any]) -> _States:
        """Some of them, with their links."""
        ticks, stored, held = self.ticks[index], self.stored[index], self.held[index]
        return _States(ticks, stored, held, self.raw[index], self.stop[index], links, self.is_open)


Extension = tuple[_States, Part, Choices, _States]
"""States, a row of choices of a part of a unit in front of each of other states; the latter."""


def _none(is_open: bool, count: int = 0) -> _States:
    zeros = np.zeros(count, np.int64)
    return _States(zeros, zeros, zeros, zeros, zeros, [None] * count, is_open)


def _joined(parts: Sequence[_States]) -> _States:
    """States of several, without links."""
    return _States(
        np.concatenate([part.ticks for part in parts]),
        np.concatenate([part.stored for part in parts]),
        np.concatenate([part.held for part in parts]),
        np.concatenate([part.raw for part in parts]),
        np.concatenate([part.stop for part in parts]),
        [],
        parts[0].is_open,
    )


class _Search:
    """Plans of the last units, from the last unit to the first.

    Args:
        bound: What any plan takes at least, of which units and under which budget.
        most_states: Most states before each unit.
        most_choices: Most ways to store a part of a unit.

    Attributes:
        complete: Whether nothing had to be dropped that could be the best.
        steps: Steps from state to state so far.
    """

    def __init__(self, bound: Bound, most_states: int, most_choices: int) -> None:
        self._bound, self._most_states, self._most_choices = bound, most_states, most_choices
        self._limit = math.inf
        self.complete, self.steps = True, 0

    def best(self, limit: float) -> tuple[int, Mix] | None:
        """The plan with the least time, with the fewest bytes among equals; None if there is none.

        Args:
            limit: What another plan takes: ticks, or bytes if time is free.

        Returns:
            What the plan takes, and the plan.
        """
        self._limit = limit * (1 + 1e-9)  # scores are rounded
        units = self._bound.units
        behind, opened = _none(is_open=False, count=1), _none(is_open=True)
        for index in reversed(range(len(units))):
            steps = [self._before(behind, index, "kept")]
            if units[index].seconds is None:
                opened = _none(is_open=True)
            else:
                inner = [self._before(states, index, "after") for states in (opened, behind)]
                opened = self._best_of(index, inner[:1])
                steps += [self._before(opened, index, "arguments"), self._before(behind, index, "recomputed")]
                opened = self._best_of(index, inner) if index not in self._bound.starts else _none(is_open=True)
            behind = self._best_of(index, steps)
        if not len(behind.ticks):
            return None
        best = int(np.lexsort((behind.held, behind.ticks))[0])
        taken = behind.ticks if self._bound.ticks_in_second else behind.held
        return int(taken[best]), mix_of(units, _steps(behind.links[best]))

    def _before(self, behind: _States, index: int, part: Part) -> Extension:
        """Put a part of a unit in front of each plan, in each way."""
        unit, sizes = self._bound.units[index], self._bound.sizes
        found = choices(saved_of(unit, part), self._bound.ticks_in_second, self._bound.in_flight, self._most_choices)
        self.complete &= found.complete
        self.steps += len(behind.ticks) * len(found.ticks)
        others, held = self._bound.in_flight - 1, behind.held[:, None]
        if not behind.is_open:
            held = np.maximum(held, (others * behind.stored + behind.raw)[:, None] + found.moved)
        stored = np.add.outer(behind.stored, found.stored).ravel()
        stop = np.repeat(behind.stop, len(found.ticks)) if behind.is_open else np.full(len(stored), index + 1)
        if part == "kept":
            raw = np.full(len(stored), sizes.kept(index))
        else:
            raw = sizes.inner(index, stop) + (0 if part == "after" else sizes.arguments[index])
        held = np.maximum((held + self._bound.in_flight * found.stored).ravel(), others * stored + raw)
        seconds = unit.seconds if part in {"recomputed", "after"} else None
        ticks = np.add.outer(behind.ticks, found.ticks + round((seconds or 0.0) * self._bound.ticks_in_second)).ravel()
        return _States(ticks, stored, held, raw, stop, [], part == "after"), part, found, behind

    def _best_of(self, index: int, extensions: Sequence[Extension]) -> _States:
        """Plans that no other surpasses, and that could still be the best."""
        states = _joined([extension[0] for extension in extensions])
        score = self._bound(index, states.is_open, states.ticks, states.held)
        some = np.flatnonzero((states.held <= self._bound.budget) & (score <= self._limit) & (score < math.inf))
        some = self._thinned(some, score, states.held, 8 * self._most_states)
        if self._bound.in_flight == 1:
            some = some[unsurpassed(states.ticks[some], states.held[some], states.raw[some])]
        else:
            alike = [some[states.raw[some] == raw] for raw in np.unique(states.raw[some])]
            groups = [g[unsurpassed(states.ticks[g], states.held[g], states.stored[g])] for g in alike]
            some = np.concatenate([some[:0], *groups])
        some = self._thinned(some, score, states.held, self._most_states)
        ends, links = np.cumsum([len(extension[0].ticks) for extension in extensions]), list[Any]()
        for place, kind in zip(some.tolist(), np.searchsorted(ends, some, side="right").tolist(), strict=True):
            own, part, found, behind = extensions[kind]
            link, row = divmod(place - int(ends[kind]) + len(own.ticks), len(found.ticks))
            links.append(((index, part, found.ways[row]), behind.links[link]))
        return states.take(some, links)

    def _thinned(self, some: Numbers, score: Any, held: Numbers, most: int) -> Numbers:
        """The states with the fewest bytes, the most promising for each of several amounts of bytes, and of all."""
        if len(some) <= most:
            return some
        self.complete = False
        held, score = held[some], score[some]
        low, high = int(held.min()), int(held.max())
        amount = (held - low) * (most // 2) // (high - low + 1)
        order = np.lexsort((held, score, amount))
        rank = np.full(len(some), 2)
        rank[order[np.unique(amount[order], return_index=True)[1]]] = 1
        rank[held.argmin()] = 0
        return some[np.lexsort((held, score, rank))[:most]]


def _steps(link: Any) -> Iterator[Step]:
    while link is not None:
        yield link[0]
        link = link[1]
