"""Plans of mixed techniques with room for what their choices bring along.

A code takes room beside what it is made of, and beside what is made of it. A tensor that several units read, such as a
skip connection, is there whenever one of them runs, wherever it is meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from lightning_hybrid.functional.mixing import cheapest_mix, smallest_mix_budget
from lightning_hybrid.functional.mixing_plan import Mix, Saved, Unit, Way, mix_peak_bytes, mix_seconds, pairs_of
from lightning_hybrid.functional.segments import Segment

MOST_PLANS = 4
"""Most plans that count on no other room than that of what the plans before have chosen."""


def units_with_room(units: Sequence[Unit], mix: Mix) -> list[Unit]:
    """Units of a plan, with room beside the last of each segment for what its choices bring along.

    That is the largest code of the segment, as one storage at a time is encoded or decoded, and everything else is
    counted as it is; and what is read in the segment of what is compressed or moved elsewhere.

    Args:
        units: All units, in the order in which they run.
        mix: The plan.
    """
    room, chosen = [0] * len(units), _chosen(units, mix)
    for segment in mix.segments:
        codes = [
            saved.compressed_bytes or 0
            for unit, saved, way in chosen
            if way == "compressed" and segment.start <= unit < segment.stop
        ]
        visitors = [saved.num_bytes for unit, saved, way in chosen if _visits(unit, saved, way, segment)]
        room[segment.stop - 1] = max(codes, default=0) + sum(visitors)
    return _with_room(units, room)


def cheapest_mix_with_room(
    units: Sequence[Unit], budget_bytes: int, in_flight: int = 1, starts: Collection[int] = ()
) -> Mix:
    """:func:`cheapest_mix` with room for what its choices bring along.

    Args:
        units: All units, in the order in which they run.
        budget_bytes: Most bytes, of all micro-batches in flight together.
        in_flight: Micro-batches whose activations are held at once.
        starts: Units with which a recomputed segment must begin.

    Returns:
        A plan whose peak with :func:`units_with_room` keeps to the budget. It is the cheapest of all if that has the
        room anyway, as it mostly has; else one that may take a little longer, but no longer than the cheapest that
        needs no room.

    Raises:
        ValueError: If no plan is found that keeps to the budget (the smallest that one is found for is named), or costs
            are wrong.
    """
    room, most, found = [0] * len(units), _most_room(units, starts), list[Mix]()
    for number in range(MOST_PLANS):
        try:
            mix = cheapest_mix(_with_room(units, room), budget_bytes, in_flight, starts)
        except ValueError:
            break
        real = units_with_room(units, mix)
        if mix_peak_bytes(real, mix, in_flight) <= budget_bytes:
            found.append(mix)
            break
        needed = [after.beside - before.beside for after, before in zip(real, units, strict=True)]
        room = most if number == MOST_PLANS - 2 else [max(pair) for pair in zip(room, needed, strict=True)]
    if found and not any(room):
        return found[0]
    plain = [_alone(unit) for unit in units]
    try:
        found.append(cheapest_mix(plain, budget_bytes, in_flight, starts))
    except ValueError:
        if not found:
            found.append(_smallest(units, most, plain, budget_bytes, in_flight, starts))
    return min(found, key=lambda mix: mix_seconds(units, mix))


def _smallest(
    units: Sequence[Unit],
    most: list[int],
    plain: Sequence[Unit],
    budget_bytes: int,
    in_flight: int,
    starts: Collection[int],
) -> Mix:
    """The plan with the lowest peak that is found, if that keeps to the budget."""

    def plan(choices: Sequence[Unit]) -> Mix:
        return cheapest_mix(choices, smallest_mix_budget(choices, in_flight, starts), in_flight, starts)

    def peak(mix: Mix) -> int:
        return mix_peak_bytes(units_with_room(units, mix), mix, in_flight)

    found, room = [plan(plain), plan(_with_room(units, most))], [0] * len(units)
    for _ in range(MOST_PLANS):
        found.append(plan(_with_room(units, room)))
        real = units_with_room(units, found[-1])
        needed = [after.beside - before.beside for after, before in zip(real, units, strict=True)]
        if all(more <= there for more, there in zip(needed, room, strict=True)):
            break
        room = [max(pair) for pair in zip(room, needed, strict=True)]
    best = min(found, key=peak)
    if peak(best) > budget_bytes:
        raise _too_small(peak(best), budget_bytes, in_flight)
    return best


def _chosen(units: Sequence[Unit], mix: Mix) -> list[tuple[int, Saved, Way]]:
    """What is compressed or moved, with its unit."""
    pairs = [(i, *pair) for i, unit in enumerate(units) for pair in pairs_of(unit, mix.ways[i])]
    return [(unit, saved, way) for unit, saved, way in pairs if way in ("compressed", "offloaded")]


def _visits(unit: int, saved: Saved, way: Way, segment: Segment) -> bool:
    """Whether a tensor of another unit is there while a segment runs and is not counted by what is stored and moved.

    What moves comes one unit early.
    """
    if unit >= segment.start or (way == "offloaded" and unit == segment.start - 1):
        return False
    reach = 1 if way == "offloaded" else 0
    return any(segment.start <= later + early < segment.stop for later in saved.later for early in range(reach + 1))


def _most_room(units: Sequence[Unit], starts: Collection[int]) -> list[int]:
    """Of each unit the most room that any segment may need that ends with it."""
    most, code, begin = list[int](), 0, 0
    visitors = [(place, s) for place, unit in enumerate(units) for s in _saved(unit) if s.later and _may_leave(s)]
    for index, unit in enumerate(units):
        if index in starts or unit.seconds is None or index == 0 or units[index - 1].seconds is None:
            code, begin = 0, index
        code = max([code, *(s.compressed_bytes or 0 for s in _saved(unit))])
        readers = {*range(begin - 1, index + 1)}  # what moves comes one unit early
        read = [s.num_bytes for place, s in visitors if place < index and not readers.isdisjoint(s.later)]
        most.append(code + sum(read))
    return most


def _may_leave(saved: Saved) -> bool:
    return saved.compressed_bytes is not None or saved.offload_seconds is not None


def _with_room(units: Sequence[Unit], room: Sequence[int]) -> list[Unit]:
    return [replace(unit, beside=unit.beside + more) for unit, more in zip(units, room, strict=True)]


def _saved(unit: Unit) -> tuple[Saved, ...]:
    return (*unit.arguments, *unit.internal, *unit.after)


def _alone(unit: Unit) -> Unit:
    """Without choices that need room."""

    def alone(parts: tuple[Saved, ...]) -> tuple[Saved, ...]:
        found = [replace(saved, compressed_bytes=None) for saved in parts]
        return tuple(replace(saved, offload_seconds=None) if saved.later else saved for saved in found)

    return replace(unit, arguments=alone(unit.arguments), internal=alone(unit.internal), after=alone(unit.after))


def _too_small(needed: int, budget_bytes: int, in_flight: int) -> ValueError:
    return ValueError(
        f"budget_bytes={budget_bytes}: no plan is found that keeps to it, with {in_flight} micro-batch(es) in flight; "
        f"the smallest takes {needed} bytes. Allow {needed} or more, use smaller micro-batches or "
        "more of the callbacks, or let ActivationOffload move more with a smaller min_bytes."
    )
