"""Plans with room for codes, compared with all plans."""

import random
import re

import pytest

from lightning_hybrid.functional.mixing_plan import Mix, Saved, Unit, Ways, mix_peak_bytes, mix_seconds
from lightning_hybrid.functional.mixing_room import cheapest_mix_with_room, units_with_room
from lightning_hybrid.functional.segments import Segment
from tests.functional.test_mixing import every_mix, random_case


def real_peak(units, plan, in_flight=1):
    return mix_peak_bytes(units_with_room(units, plan), plan, in_flight)


def compresses(plan):
    return any("compressed" in part for ways in plan.ways for part in (ways.arguments, ways.internal, ways.after))


@pytest.mark.parametrize("seed", range(3))
def test_plans_keep_to_budgets_with_their_codes_and_cost_no_more_than_without_any(seed):
    draw, num_exact, num_cases = random.Random(seed), 0, 0
    while num_cases < 30:
        units, in_flight, starts = random_case(draw)
        plans = list(every_mix(units, starts))
        if not 1 < len(plans) < 500:
            continue
        num_cases += 1
        with pytest.raises(ValueError, match="Allow") as refusal:
            cheapest_mix_with_room(units, -1, in_flight, starts)
        smallest = int(re.search(r"Allow (\d+)", str(refusal.value))[1])
        assert smallest >= min(real_peak(units, plan, in_flight) for plan in plans)
        for budget in (smallest, smallest + draw.randint(1, 20)):
            found = cheapest_mix_with_room(units, budget, in_flight, starts)
            assert real_peak(units, found, in_flight) <= budget
            possible = [plan for plan in plans if real_peak(units, plan, in_flight) <= budget]
            costs = [mix_seconds(units, plan) for plan in possible]
            plain = [mix_seconds(units, plan) for plan in possible if not compresses(plan)]
            assert min(costs) <= mix_seconds(units, found) <= min(plain, default=float("inf"))
            num_exact += mix_seconds(units, found) == min(costs)
    assert num_exact > 0.9 * 2 * num_cases


def test_the_largest_code_of_a_segment_has_room_beside_it():
    saved = Saved(8, compressed_bytes=5)
    unit = Unit((saved,), (True,), (Saved(4, compressed_bytes=3),), (Saved(2, compressed_bytes=1),), 1.0)
    kept = Ways(("kept",), ("compressed",), ("compressed",))
    assert [u.beside for u in units_with_room([unit], Mix((Segment(0, 1, False),), (kept,)))] == [3]
    first, inner = Ways(("compressed",), ("dropped",), ("kept",)), Ways(("dropped",), ("dropped",), ("compressed",))
    assert [u.beside for u in units_with_room([unit] * 2, Mix((Segment(0, 2, True),), (first, inner)))] == [0, 5]
