"""Which saved tensors are kept, recomputed, offloaded or compressed: the cheapest plan under a budget of bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

from lightning_hybrid.functional.minimising import front
from lightning_hybrid.functional.mixing_plan import (
    Mix,
    Saved,
    Unit,
    Way,
    Ways,
    bytes_at,
    check_units,
    mix_peak_bytes,
)
from lightning_hybrid.functional.segments import Segment

Numbers = np.ndarray[Any, np.dtype[np.int64]]
Part = Literal["kept", "recomputed", "arguments", "after"]
WAYS: tuple[Way, ...] = ("kept", "compressed", "offloaded")
MOST_STATES = 4096


def smallest_mix_budget(units: Sequence[Unit], in_flight: int = 1, starts: Collection[int] = ()) -> int:
    """Fewest bytes that any plan can do with.

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

    Args:
        units: All units, in the order in which they run.
        budget_bytes: Most bytes, of all micro-batches in flight together.
        in_flight: As in :func:`mix_peak_bytes`.
        starts: Units with which a recomputed segment must begin.

    Returns:
        The plan with the least :func:`mix_seconds` among those whose :func:`mix_peak_bytes` keep to the budget, with
        the fewest bytes among equals.

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
    return _Search(units, in_flight, starts, _ticks_in_second(units)).best(budget_bytes) or smallest


def _smallest(units: Sequence[Unit], in_flight: int, starts: Collection[int]) -> Mix:
    """A plan with the fewest bytes: the cheapest where time is free."""
    check_units(units)
    if in_flight < 1:
        raise ValueError(f"in_flight={in_flight}: at least one micro-batch is under way.")
    everything = sum(saved.num_bytes for u in units for saved in (*u.arguments, *u.internal, *u.after))
    found = _Search(units, in_flight, starts, 0.0).best(in_flight * everything)
    assert found is not None
    return found


def _ticks_in_second(units: Sequence[Unit]) -> float:
    """A power of two, such that all times together are some 2^50 whole ticks."""
    saved = [s for unit in units for s in (*unit.arguments, *unit.internal, *unit.after)]
    longest = [unit.seconds or 0.0 for unit in units]
    longest += [max(s.compress_seconds, s.offload_seconds or 0.0) for s in saved]
    return 2.0 ** (50 - np.frexp(sum(longest))[1])


def _saved_of(unit: Unit, part: Part) -> list[tuple[str, int]]:
    """What is stored of a unit, as field and index, in the order of a choice's ways."""
    arguments = [("arguments", i) for i, is_saved in enumerate(unit.is_saved) if is_saved or part != "kept"]
    internal = [("internal", i) for i in range(len(unit.internal))]
    after = [("after", i) for i in range(len(unit.after))]
    return {
        "kept": arguments + internal + after,
        "recomputed": arguments + after,
        "arguments": arguments,
        "after": after,
    }[part]


@dataclass(frozen=True)
class _Choices:
    """Ways to store some tensors, of which none surpasses another: an array each of time, bytes stored, bytes moved."""

    ticks: Numbers
    stored: Numbers
    moved: Numbers
    ways: np.ndarray[Any, np.dtype[np.uint8]]

    def take(self, index: Numbers) -> _Choices:
        return _Choices(self.ticks[index], self.stored[index], self.moved[index], self.ways[index])


@cache
def _options(saved: Saved, ticks_in_second: float) -> Numbers:
    """Of one tensor, a row each: way, time, bytes stored, bytes moved."""
    rows = [(0, 0, saved.num_bytes, 0)]
    if saved.compressed_bytes is not None and saved.compressed_bytes < saved.num_bytes:
        rows.append((1, round(saved.compress_seconds * ticks_in_second), saved.compressed_bytes, 0))
    if saved.offload_seconds is not None and saved.num_bytes:
        rows.append((2, round(saved.offload_seconds * ticks_in_second), 0, saved.num_bytes))
    return np.array(rows, np.int64)


def _choices(items: tuple[Saved, ...], ticks_in_second: float, is_last: bool) -> _Choices:
    zero = np.zeros(1, np.int64)
    found = _Choices(zero, zero, zero, np.zeros((1, 0), np.uint8))
    for saved in items:
        options = _options(saved, ticks_in_second)
        ways = np.repeat(found.ways, len(options), axis=0)
        more = np.tile(options[:, 0].astype(np.uint8), len(found.ticks))
        found = _Choices(
            (found.ticks[:, None] + options[:, 1]).ravel(),
            (found.stored[:, None] + options[:, 2]).ravel(),
            (found.moved[:, None] + options[:, 3] * is_last).ravel(),
            np.column_stack((ways, more)),
        )
        found = found.take(_unsurpassed(found.ticks, found.stored, found.moved))
    return found


def _unsurpassed(ticks: Numbers, second: Numbers, third: Numbers) -> Numbers:
    """Of states that are better if their numbers are smaller, those that no other surpasses or equals."""
    states = zip(ticks.tolist(), second.tolist(), third.tolist(), range(len(ticks)), strict=True)
    return _spread(np.array([state[3] for state in front(states)], np.int64), second)


def _spread(index: Numbers, second: Numbers) -> Numbers:
    """At most `MOST_STATES`, evenly, the one with the least second number included."""
    if len(index) <= MOST_STATES:
        return index
    chosen = np.linspace(0, len(index) - 1, MOST_STATES - 1).astype(np.int64)
    return index[np.unique(np.append(chosen, np.argmin(second[index])))]


@dataclass(frozen=True)
class _States:
    """Plans of the last units, an array each of their time and bytes, of all micro-batches in flight.

    Attributes:
        ticks: Time.
        stored: Bytes stored of one micro-batch.
        held: Most bytes at once, without what units before store and move.
        first: Bytes while the first segment runs, to which comes what the unit before moves.
        links: Of each, its first step and the plan behind it.
    """

    ticks: Numbers
    stored: Numbers
    held: Numbers
    first: Numbers
    links: list[Any]

    def closed(self, others: int, raw: int) -> _States:
        """With the bytes of the first segment, which is complete."""
        first = others * self.stored + raw
        return _States(self.ticks, self.stored, np.maximum(self.held, first), first, self.links)


def _joined(states: Sequence[_States]) -> _States:
    def join(name: str) -> Numbers:
        return np.concatenate([np.zeros(0, np.int64), *(getattr(s, name) for s in states)])

    links = [link for s in states for link in s.links]
    return _States(join("ticks"), join("stored"), join("held"), join("first"), links)


class _Search:
    """Plans of the last units, from the last unit to the first.

    Args:
        units: All units.
        in_flight: Micro-batches in flight.
        starts: Units with which a segment must begin.
        ticks_in_second: Unit of time; 0 if time is free.
    """

    def __init__(self, units: Sequence[Unit], in_flight: int, starts: Collection[int], ticks_in_second: float) -> None:
        self._units, self._in_flight, self._starts, self._ticks = units, in_flight, set(starts), ticks_in_second

    def best(self, budget: int) -> Mix | None:
        """The cheapest plan under a budget, with the fewest bytes among equals; None if there is none."""
        zero = np.zeros(1, np.int64)
        behind = _States(zero, zero, zero, zero, [None])
        opened: list[_States] = []  # recomputed segments of several blocks, by where they end
        for index in reversed(range(len(self._units))):
            raw = bytes_at(self._units, Segment(index, index + 1, False))
            found = [self._before(behind, index, "kept", budget).closed(self._in_flight - 1, raw)]
            if self._units[index].seconds is None:
                opened = []
            else:
                raw = bytes_at(self._units, Segment(index, index + 1, True))
                found += [self._before(behind, index, "recomputed", budget).closed(self._in_flight - 1, raw)]
                ends = [index + 1 + place for place in range(1, len(opened) + 1)]
                opened = [self._before(states, index, "after", budget, is_last=False) for states in opened]
                for stop, states in zip(ends, opened, strict=True):
                    raw = bytes_at(self._units, Segment(index, stop, True))
                    closed = self._before(states, index, "arguments", budget, is_last=False)
                    found.append(closed.closed(self._in_flight - 1, raw))
                opened = [self._open(self._before(behind, index, "after", budget)), *opened]
            if index in self._starts:
                opened = []
            joined = _joined(found)
            fits = np.flatnonzero(joined.held <= budget)
            behind = _taken(joined, fits, [joined.links[i] for i in fits])
        if not len(behind.ticks):
            return None
        best = min(range(len(behind.ticks)), key=lambda i: (behind.ticks[i], behind.held[i]))
        return self._mix(behind.links[best])

    def _open(self, states: _States) -> _States:
        return _States(states.ticks, states.stored, states.held, states.held, states.links)

    def _before(self, behind: _States, index: int, part: Part, budget: int, is_last: bool = True) -> _States:
        """Put a unit in front of each plan."""
        unit = self._units[index]
        items = tuple(getattr(unit, name)[i] for name, i in _saved_of(unit, part))
        choices = _choices(items, self._ticks, is_last)
        time = 0 if part in {"kept", "arguments"} else round((unit.seconds or 0.0) * self._ticks)
        at_next = np.maximum(behind.first[:, None] + choices.moved, behind.held[:, None])
        found = _States(
            (behind.ticks[:, None] + choices.ticks + time).ravel(),
            (behind.stored[:, None] + choices.stored).ravel(),
            (at_next + self._in_flight * choices.stored).ravel(),
            np.zeros(0, np.int64),
            [],
        )
        fits = np.flatnonzero(found.held <= budget)
        matter = found.stored[fits] if self._in_flight > 1 else np.zeros(len(fits), np.int64)
        chosen = fits[_unsurpassed(found.ticks[fits], found.held[fits], matter)]
        places, rows = np.divmod(chosen, len(choices.ticks))
        steps = zip(places.tolist(), rows.tolist(), strict=True)
        return _taken(found, chosen, [((index, part, choices.ways[row]), behind.links[i]) for i, row in steps])

    def _mix(self, link: Any) -> Mix:
        segments, ways = list[Segment](), list[dict[str, list[Way]]]()
        for index, part, chosen in _steps(link):
            unit = self._units[index]
            if index == len(ways):
                sizes = {name: len(getattr(unit, name)) for name in ("arguments", "internal", "after")}
                ways.append({name: ["dropped"] * size for name, size in sizes.items()})
            if part != "after":
                segments.append(Segment(index, index + 1, part != "kept"))
            segments[-1] = Segment(segments[-1].start, index + 1, segments[-1].recomputed)
            for (name, i), way in zip(_saved_of(unit, part), chosen, strict=True):
                ways[index][name][i] = WAYS[way]
        tuples = ({name: tuple(part) for name, part in of_unit.items()} for of_unit in ways)
        return Mix(tuple(segments), tuple(Ways(**t) for t in tuples))


def _taken(states: _States, index: Numbers, links: list[Any]) -> _States:
    first = states.first[index] if len(states.first) else states.held[index]
    return _States(states.ticks[index], states.stored[index], states.held[index], first, links)


def _steps(link: Any) -> Iterator[tuple[int, Part, Any]]:
    while link is not None:
        yield link[0]
        link = link[1]
