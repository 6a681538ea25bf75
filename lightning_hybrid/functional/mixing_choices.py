"""Ways to store the saved tensors of a unit together, those that no others surpass; and steps of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from lightning_hybrid.functional.minimising import front
from lightning_hybrid.functional.mixing_plan import Mix, Saved, Unit, Way, Ways, bytes_at
from lightning_hybrid.functional.segments import Segment

Numbers = np.ndarray[Any, np.dtype[np.int64]]
Part = Literal["kept", "recomputed", "arguments", "after"]
"""What of a unit a step decides: all of one that is kept or of a segment by itself; or of a longer segment the first
block's arguments or the code behind a block."""

NUM_PRICES = 16
WAYS: tuple[Way, ...] = ("kept", "compressed", "offloaded")
Step = tuple[int, Part, Any]
"""Index of a unit, what is decided, and of each of its tensors an index into `WAYS`."""


def fields_of(unit: Unit, part: Part) -> list[tuple[str, int]]:
    """Names and indices of the tensors that a step decides, in its order."""
    arguments = [("arguments", i) for i, is_saved in enumerate(unit.is_saved) if is_saved or part != "kept"]
    internal = [("internal", i) for i in range(len(unit.internal))]
    after = [("after", i) for i in range(len(unit.after))]
    return {
        "kept": arguments + internal + after,
        "recomputed": arguments + after,
        "arguments": arguments,
        "after": after,
    }[part]


def saved_of(unit: Unit, part: Part) -> tuple[Saved, ...]:
    """The tensors that a step decides."""
    return tuple(getattr(unit, name)[i] for name, i in fields_of(unit, part))


class Sizes:
    """:func:`bytes_at` of any segment, at once.

    Args:
        units: All units.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.arguments = [sum(saved.num_bytes for saved in unit.arguments) for unit in units]
        self._beside = np.array([unit.beside for unit in units], np.int64)
        kept = [bytes_at(units, Segment(i, i + 1, False)) - unit.beside for i, unit in enumerate(units)]
        self._sum = np.cumsum([0, *kept])
        self._saved_arguments = [sum(saved.num_bytes for saved in unit.saved_arguments) for unit in units]

    def kept(self, index: int) -> int:
        """Of a unit that is kept."""
        return int(self._sum[index + 1] - self._sum[index] + self._beside[index])

    def inner(self, start: int, stops: Numbers) -> Numbers:
        """Of recomputed segments from one unit to before others, without their arguments."""
        return self._sum[stops] - self._sum[start] - self._saved_arguments[start] + self._beside[stops - 1]


def mix_of(units: Sequence[Unit], steps: Iterable[Step]) -> Mix:
    """The plan that steps from the first unit to the last make."""
    segments, ways = list[Segment](), list[dict[str, list[Way]]]()
    for index, part, chosen in steps:
        unit = units[index]
        if index == len(ways):
            ways.append({name: ["dropped"] * len(getattr(unit, name)) for name in ("arguments", "internal", "after")})
        if part != "after":
            segments.append(Segment(index, index + 1, part != "kept"))
        segments[-1] = Segment(segments[-1].start, index + 1, segments[-1].recomputed)
        for (name, i), way in zip(fields_of(unit, part), chosen, strict=True):
            ways[index][name][i] = WAYS[way]
    return Mix(tuple(segments), tuple(Ways(**{name: tuple(of) for name, of in unit.items()}) for unit in ways))


def options(saved: Saved, ticks_in_second: float) -> Iterator[tuple[int, int, int, int]]:
    """Of one tensor: way, time, bytes stored, bytes moved; without what keeping it surpasses."""
    yield 0, 0, saved.num_bytes, 0
    if saved.compressed_bytes is not None and saved.compressed_bytes < saved.num_bytes:
        yield 1, round(saved.compress_seconds * ticks_in_second), saved.compressed_bytes, 0
    if saved.offload_seconds is not None and saved.num_bytes:
        yield 2, round(saved.offload_seconds * ticks_in_second), 0, saved.num_bytes


@dataclass(frozen=True)
class Choices:
    """Ways to store some tensors, an array each, the quickest first.

    Attributes:
        ticks: Time.
        stored: Bytes stored.
        moved: Bytes moved.
        ways: Of each tensor an index into `WAYS`, a row a choice.
        complete: Whether no choice is left out but those that others surpass.
    """

    ticks: Numbers
    stored: Numbers
    moved: Numbers
    ways: np.ndarray[Any, np.dtype[np.uint8]]
    complete: bool

    def take(self, index: Numbers, complete: bool) -> Choices:
        """Some of them."""
        return Choices(self.ticks[index], self.stored[index], self.moved[index], self.ways[index], complete)


@lru_cache(maxsize=256)
def choices(items: tuple[Saved, ...], ticks_in_second: float, in_flight: int, most: int) -> Choices:
    """Ways to store some tensors.

    Args:
        items: The tensors.
        ticks_in_second: Unit of time; 0 if time is free.
        in_flight: Micro-batches in flight, each of which stores them.
        most: Most choices. Of more, those are taken that are best at some price of bytes.
    """
    zero = np.zeros(1, np.int64)
    found = Choices(zero, zero, zero, np.zeros((1, 0), np.uint8), complete=True)
    prices = _prices(items, ticks_in_second)
    for saved in items:
        way, ticks, stored, moved = np.array(list(options(saved, ticks_in_second)), np.int64).T
        ways = np.repeat(found.ways, len(way), axis=0), np.tile(way.astype(np.uint8), len(found.ticks))
        found = Choices(
            np.add.outer(found.ticks, ticks).ravel(),
            np.add.outer(found.stored, stored).ravel(),
            np.add.outer(found.moved, moved).ravel(),
            np.column_stack(ways),
            found.complete,
        )
        # later units meet what is stored of all micro-batches in flight, and the next one also what is moved
        at_next = in_flight * found.stored + found.moved
        index = unsurpassed(found.ticks, found.stored, at_next)
        if len(index) > most:
            costs = _costs(found.ticks[index], in_flight * found.stored[index], at_next[index], prices)
            index = index[_best_of_each(costs, most)]
            found = found.take(index, complete=False)
        else:
            found = found.take(index, found.complete)
    return found


def unsurpassed(first: Numbers, second: Numbers, third: Numbers) -> Numbers:
    """Of states that are better if their numbers are smaller, those that no other surpasses or equals."""
    states = zip(first.tolist(), second.tolist(), third.tolist(), range(len(first)), strict=True)
    return np.array([state[3] for state in front(states)], np.int64)


def _prices(items: tuple[Saved, ...], ticks_in_second: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Ticks a byte, from less than any tensor's way saves bytes for to more."""
    found = [(o[1], saved.num_bytes - o[2]) for saved in items for o in options(saved, ticks_in_second)]
    slopes = [ticks / saved for ticks, saved in found if ticks and saved] or [1.0]
    return np.geomspace(min(slopes) / 4, max(slopes) * 4, NUM_PRICES)


def _costs(ticks: Numbers, stored: Numbers, at_next: Numbers, prices: Any) -> Any:
    """Time and bytes at each price, a row a choice; the bytes those stored, those at the next unit, and between."""
    sizes = np.stack((stored, (stored + at_next) / 2, at_next), axis=1)
    return (ticks[:, None, None] + sizes[:, :, None] * prices).reshape(len(ticks), -1)


def _best_of_each(costs: Any, most: int) -> Numbers:
    """At most so many rows: the lowest of each column, and as many of the next lowest as there is room for."""
    ranks = np.empty(costs.shape, np.int64)
    np.put_along_axis(ranks, costs.argsort(axis=0, kind="stable"), np.arange(len(costs))[:, None], axis=0)
    return np.sort(ranks.min(axis=1).argsort(kind="stable")[:most])
