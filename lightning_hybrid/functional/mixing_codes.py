"""Plans of mixed techniques where a code takes room beside what it is made of, or what is made of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate

from lightning_hybrid.functional.mixing import cheapest_mix, smallest_mix_budget
from lightning_hybrid.functional.mixing_plan import Mix, Saved, Unit, mix_peak_bytes, mix_seconds, pairs_of

MOST_PLANS = 4
"""Most plans that count on no room but that of codes which the plans before have chosen."""


def units_with_codes(units: Sequence[Unit], mix: Mix) -> list[Unit]:
    """Units of a plan, with room beside each segment for the largest code that is chosen in it.

    One storage at a time is encoded, or decoded, and everything else of its segment is counted as it is.
    """
    codes = [0] * len(units)
    for segment in mix.segments:
        inside = range(segment.start, segment.stop)
        pairs = [pair for i in inside for pair in pairs_of(units[i], mix.ways[i])]
        chosen = [saved.compressed_bytes or 0 for saved, way in pairs if way == "compressed"]
        codes[segment.stop - 1] = max(chosen, default=0)
    return _with_room(units, codes)


def cheapest_mix_with_codes(
    units: Sequence[Unit], budget_bytes: int, in_flight: int = 1, starts: Collection[int] = ()
) -> Mix:
    """:func:`cheapest_mix` with room for codes, where a plan compresses.

    Args:
        units: All units, in the order in which they run.
        budget_bytes: Most bytes, of all micro-batches in flight together.
        in_flight: Micro-batches whose activations are held at once.
        starts: Units with which a recomputed segment must begin.

    Returns:
        A plan whose peak with :func:`units_with_codes` keeps to the budget. It is the cheapest of all if that has room
        for codes anyway, as it mostly has; else one that may take a little longer, but no longer than the cheapest
        that compresses nothing.

    Raises:
        ValueError: If no plan is found that keeps to the budget (the smallest that one is found for is named), or costs
            are wrong.
    """
    room = [0] * len(units)
    most = _largest_codes(units, starts)
    found: list[Mix] = []
    for number in range(MOST_PLANS):
        try:
            mix = cheapest_mix(_with_room(units, room), budget_bytes, in_flight, starts)
        except ValueError:
            break
        real = units_with_codes(units, mix)
        if mix_peak_bytes(real, mix, in_flight) <= budget_bytes:
            found.append(mix)
            break
        needed = [after.beside - before.beside for after, before in zip(real, units, strict=True)]
        room = most if number == MOST_PLANS - 2 else [max(pair) for pair in zip(room, needed, strict=True)]
    if found and not any(room):
        return found[0]
    plain = [_uncompressed(unit) for unit in units]
    try:
        found.append(cheapest_mix(plain, budget_bytes, in_flight, starts))
    except ValueError:
        if not found:
            raise _too_small(units, plain, most, budget_bytes, in_flight, starts) from None
    return min(found, key=lambda mix: mix_seconds(units, mix))


def _largest_codes(units: Sequence[Unit], starts: Collection[int]) -> list[int]:
    """Of each unit the largest code that any segment may have that ends with it."""
    own = [max((s.compressed_bytes or 0 for s in _saved(unit)), default=0) for unit in units]
    begins = [i in starts or unit.seconds is None for i, unit in enumerate(units)]
    begins = [begins[i] or (i > 0 and units[i - 1].seconds is None) for i in range(len(units))]
    pairs = zip(own, begins, strict=True)
    return [code for code, _ in accumulate(pairs, lambda a, b: (b[0] if b[1] else max(a[0], b[0]), False))]


def _with_room(units: Sequence[Unit], room: Sequence[int]) -> list[Unit]:
    return [replace(unit, beside=unit.beside + more) for unit, more in zip(units, room, strict=True)]


def _saved(unit: Unit) -> tuple[Saved, ...]:
    return (*unit.arguments, *unit.internal, *unit.after)


def _uncompressed(unit: Unit) -> Unit:
    parts = [tuple(replace(s, compressed_bytes=None) for s in part) for part in (unit.arguments, unit.internal)]
    after = tuple(replace(s, compressed_bytes=None) for s in unit.after)
    return replace(unit, arguments=parts[0], internal=parts[1], after=after)


def _too_small(
    units: Sequence[Unit],
    plain: Sequence[Unit],
    room: Sequence[int],
    budget_bytes: int,
    in_flight: int,
    starts: Collection[int],
) -> ValueError:
    needed = min(smallest_mix_budget(some, in_flight, starts) for some in (_with_room(units, room), plain))
    return ValueError(
        f"budget_bytes={budget_bytes}: the activations of {len(units)} blocks, with {in_flight} micro-batch(es) in "
        f"flight, take at least {needed} bytes, whatever is recomputed, moved or compressed. Allow {needed} or more, "
        "or use smaller micro-batches."
    )
