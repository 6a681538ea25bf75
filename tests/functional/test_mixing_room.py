"""Plans with room for what their choices bring along, compared with all plans."""

import random
import re
from dataclasses import replace

import pytest

from lightning_hybrid.functional.mixing_plan import Mix, Saved, Unit, Ways, mix_peak_bytes, mix_seconds, pairs_of
from lightning_hybrid.functional.mixing_room import cheapest_mix_with_room, units_with_room
from lightning_hybrid.functional.segments import Segment
from tests.functional.test_mixing import every_mix, random_case


def real_peak(units, plan, in_flight=1):
    return mix_peak_bytes(units_with_room(units, plan), plan, in_flight)


def needs_no_room(units, plan):
    pairs = [pair for unit, ways in zip(units, plan.ways, strict=True) for pair in pairs_of(unit, ways)]
    return not any(way == "compressed" or (way == "offloaded" and saved.later) for saved, way in pairs)


def read_again(units, draw):
    """The same, where later units read some of what code behind blocks saves."""
    found = []
    for index, unit in enumerate(units):
        later = [tuple(i for i in range(index + 1, len(units)) if draw.random() < 0.4) for _ in unit.after]
        after = tuple(replace(saved, later=places) for saved, places in zip(unit.after, later, strict=True))
        found.append(replace(unit, after=after))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_plans_keep_to_budgets_with_their_room_and_cost_no_more_than_those_that_need_none(seed):
    draw, num_exact, num_least, num_cases = random.Random(seed), 0, 0, 0
    while num_cases < 30:
        units, in_flight, starts = random_case(draw)
        units = read_again(units, draw)
        plans = list(every_mix(units, starts))
        if not 1 < len(plans) < 500:
            continue
        num_cases += 1
        with pytest.raises(ValueError, match="Allow") as refusal:
            cheapest_mix_with_room(units, -1, in_flight, starts)
        smallest = int(re.search(r"Allow (\d+)", str(refusal.value))[1])
        least = min(real_peak(units, plan, in_flight) for plan in plans)
        assert smallest >= least
        num_least += smallest == least
        for budget in (smallest, smallest + draw.randint(1, 20)):
            found = cheapest_mix_with_room(units, budget, in_flight, starts)
            assert real_peak(units, found, in_flight) <= budget
            possible = [plan for plan in plans if real_peak(units, plan, in_flight) <= budget]
            costs = [mix_seconds(units, plan) for plan in possible]
            plain = [mix_seconds(units, plan) for plan in possible if needs_no_room(units, plan)]
            assert min(costs) <= mix_seconds(units, found) <= min(plain, default=float("inf"))
            num_exact += mix_seconds(units, found) == min(costs)
    assert num_exact > 0.9 * 2 * num_cases
    assert num_least > 0.9 * num_cases


def test_the_largest_code_of_a_segment_has_room_beside_it():
    saved = Saved(8, compressed_bytes=5)
    unit = Unit((saved,), (True,), (Saved(4, compressed_bytes=3),), (Saved(2, compressed_bytes=1),), 1.0)
    kept = Ways(("kept",), ("compressed",), ("compressed",))
    assert [u.beside for u in units_with_room([unit], Mix((Segment(0, 1, False),), (kept,)))] == [3]
    first, inner = Ways(("compressed",), ("dropped",), ("kept",)), Ways(("dropped",), ("dropped",), ("compressed",))
    assert [u.beside for u in units_with_room([unit] * 2, Mix((Segment(0, 2, True),), (first, inner)))] == [0, 5]


def test_what_later_units_read_has_room_beside_them():
    saved = Saved(8, compressed_bytes=0, offload_seconds=1.0, later=(2, 4))
    units, segments = [Unit(after=(saved,)), *[Unit(seconds=1.0)] * 5], [Segment(i, i + 1, False) for i in range(6)]

    def beside(way, segments):
        return [u.beside for u in units_with_room(units, Mix(segments, (Ways(after=(way,)), *[Ways()] * 5)))]

    assert beside("kept", segments) == [0] * 6
    assert beside("compressed", segments) == [0, 0, 8, 0, 8, 0]
    assert beside("offloaded", segments) == [0, 0, 8, 8, 8, 8]  # it comes back one unit early
    together = [*segments[:1], Segment(1, 3, True), Segment(3, 6, True)]
    assert beside("offloaded", together) == [0, 0, 0, 0, 0, 8]  # the first segment counts what has just moved
    assert beside("compressed", together) == [0, 0, 8, 0, 0, 8]
