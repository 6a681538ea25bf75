import math
import random
from functools import partial
from itertools import islice, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.functional.mixing import cheapest_mix, smallest_mix_budget
from lightning_hybrid.functional.mixing_plan import (
    MIX_COLUMNS,
    Mix,
    Saved,
    Unit,
    Ways,
    mix_peak_bytes,
    mix_rows,
    mix_seconds,
    mix_stored_bytes,
    pairs_of,
)
from lightning_hybrid.functional.offloading import cheapest_offload, offloaded_peak_bytes, smallest_offload_budget
from lightning_hybrid.functional.recomputation import cheapest_segments, smallest_budget
from lightning_hybrid.functional.segments import BlockCost, Segment, extra_seconds, peak_bytes


def every_cut(units, starts):
    """All segments over some units."""
    for cuts in product((False, True), repeat=max(0, len(units) - 1)):
        bounds = [0, *(i for i, is_cut in enumerate(cuts, start=1) if is_cut), len(units)] if units else [0]
        runs = [range(*run) for run in pairwise(bounds)]
        for recomputed in product((False, True), repeat=len(runs)):
            pairs = list(zip(runs, recomputed, strict=True))
            if all(
                not starts & {*run[1:]} and all(units[i].seconds is not None for i in run) if again else len(run) == 1
                for run, again in pairs
            ):
                yield tuple(Segment(run[0], run[-1] + 1, again) for run, again in pairs)


def possible(saved):
    ways = ["kept"]
    ways += ["compressed"] if saved.compressed_bytes is not None else []
    return [*ways, "offloaded"] if saved.offload_seconds is not None else ways


def every_mix(units, starts=frozenset()):
    for segments in every_cut(units, starts):
        parts = []
        for segment in segments:
            for i in range(segment.start, segment.stop):
                unit, first = units[i], segment.recomputed and i == segment.start
                held = [first or (is_saved and not segment.recomputed) for is_saved in unit.is_saved]
                pairs = zip(unit.arguments, held, strict=True)
                parts.append([possible(saved) if is_held else ["dropped"] for saved, is_held in pairs])
                parts.append([["dropped"] if segment.recomputed else possible(saved) for saved in unit.internal])
                parts.append([possible(saved) for saved in unit.after])
        for flat in product(*(ways for part in parts for ways in part)):
            ways = iter(flat)
            filled = [tuple(next(ways) for _ in part) for part in parts]
            yield Mix(segments, tuple(Ways(*filled[i : i + 3]) for i in range(0, len(filled), 3)))


def random_saved(draw):
    sizes, times = draw.choice([None, draw.randint(0, 9)]), draw.choice([None, draw.randint(0, 5)])
    return Saved(draw.randint(0, 9), sizes, draw.randint(0, 4), times)


def random_unit(draw):
    parts = [[], [], []]
    for _ in range(draw.randint(0, 3)):
        draw.choice(parts).append(random_saved(draw))
    arguments, internal, after = map(tuple, parts)
    is_saved = tuple(draw.random() < 0.5 for _ in arguments)
    seconds, beside = draw.choice([None, *(draw.randint(0, 6) for _ in range(3))]), draw.choice([0, draw.randint(0, 9)])
    return Unit(arguments, is_saved, internal, after, seconds, beside)


def random_case(draw):
    units = [random_unit(draw) for _ in range(draw.randint(0, 4))]
    return units, draw.randint(1, 3), frozenset(i for i in range(1, 4) if draw.random() < 0.2)


def values_of(units, in_flight, starts=frozenset(), most=None):
    """Seconds and peak of all plans; none if there are more than that."""
    plans = list(islice(every_mix(units, starts), None if most is None else most + 1))
    if most is not None and len(plans) > most:
        return []
    return [(mix_seconds(units, plan), mix_peak_bytes(units, plan, in_flight)) for plan in plans]


def value(units, plan, in_flight=1):
    return mix_seconds(units, plan), mix_peak_bytes(units, plan, in_flight)


@pytest.mark.parametrize("seed", range(10))
def test_plans_are_the_best_of_all(seed):
    draw, num_cases = random.Random(seed), 0
    while num_cases < 20:
        units, in_flight, starts = random_case(draw)
        if not (values := values_of(units, in_flight, starts, most=500)):
            continue
        num_cases += 1
        smallest = min(peak for _, peak in values)
        assert smallest_mix_budget(units, in_flight, starts) == smallest
        for budget in {smallest, smallest + draw.randint(1, 30)}:
            plan = cheapest_mix(units, budget, in_flight, starts)
            assert value(units, plan, in_flight) == min(v for v in values if v[1] <= budget)
        with pytest.raises(ValueError, match=f"at least {smallest} bytes"):
            cheapest_mix(units, smallest - 1, in_flight, starts)


def test_large_plans_are_the_best_of_all():
    draw = random.Random(0)
    tensors = [Saved(draw.randint(1, 9), draw.randint(0, 5), draw.randint(1, 5), draw.randint(1, 9)) for _ in range(8)]
    units = [
        Unit(tuple(tensors[:1]), (True,), tuple(tensors[1:3]), (), 3.0),
        Unit(tuple(tensors[3:4]), (False,), tuple(tensors[4:6]), tuple(tensors[6:7]), 2.0),
        Unit((), (), tuple(tensors[7:])),
    ]
    values = values_of(units, in_flight=2)
    smallest = min(peak for _, peak in values)
    assert len(values) > 3000
    assert smallest_mix_budget(units, 2) == smallest
    for budget in range(smallest, 2 * sum(saved.num_bytes for saved in tensors), 9):
        assert value(units, cheapest_mix(units, budget, 2), 2) == min(v for v in values if v[1] <= budget)


BYTES, TIMES = st.integers(0, 9), st.integers(0, 5)
SAVED = st.builds(Saved, BYTES, st.none() | BYTES, TIMES, st.none() | TIMES)


@st.composite
def small_units(draw):
    units = []
    for _ in range(draw(st.integers(0, 3))):
        arguments, internal, after = (tuple(draw(st.lists(SAVED, max_size=1))) for _ in range(3))
        is_saved = tuple(draw(st.booleans()) for _ in arguments)
        units.append(Unit(arguments, is_saved, internal, after, draw(st.none() | TIMES)))
    return units


@settings(max_examples=60)
@given(units=small_units(), in_flight=st.integers(1, 3), starts=st.sets(st.integers(1, 2)), more=st.integers(0, 20))
def test_a_plan_is_the_best_of_all_and_costs_no_more_with_more_bytes(units, in_flight, starts, more):
    smallest = smallest_mix_budget(units, in_flight, starts)
    plans = [cheapest_mix(units, smallest + n, in_flight, starts) for n in (0, more, more + 3)]
    found = [value(units, plan, in_flight) for plan in plans]
    assert [seconds for seconds, _ in found] == sorted((seconds for seconds, _ in found), reverse=True)
    assert all(peak <= smallest + n for (_, peak), n in zip(found, (0, more, more + 3), strict=True))
    if values := values_of(units, in_flight, frozenset(starts), most=300):
        assert smallest == min(peak for _, peak in values)
        assert found[1] == min(v for v in values if v[1] <= smallest + more)


UNITS = [
    Unit(internal=(Saved(10, offload_seconds=1),)),
    Unit((Saved(4, 1, 0.5), Saved(3)), (False, True), (Saved(20), Saved(5, 2, 0.25)), (Saved(6, 3, 0.125),), 2.0),
    Unit((Saved(4, 1, 0.5),), (True,), (Saved(30),), (Saved(1), Saved(2, offload_seconds=4)), 3.0),
    Unit((Saved(7),), (True,), (Saved(8, 3, 0.5),), (), 1.0),
]
PLAN = Mix(
    (Segment(0, 1, False), Segment(1, 3, True), Segment(3, 4, False)),
    (
        Ways(internal=("offloaded",)),
        Ways(("compressed", "kept"), ("dropped", "dropped"), ("compressed",)),
        Ways(("dropped",), ("dropped",), ("kept", "offloaded")),
        Ways(("kept",), ("compressed",)),
    ),
)


def test_the_peak_has_what_is_stored_what_has_just_moved_and_all_of_the_segment_at_work():
    first = 10
    recomputed = 10 + (4 + 3 + 20 + 5 + 6) + (4 + 30 + 1 + 2)  # the first unit's tensor is still leaving
    stored = (1 + 3 + 3) + 1
    last = stored + 2 + 7 + 8
    assert mix_peak_bytes(UNITS, PLAN) == max(first, recomputed, last)
    assert mix_stored_bytes(UNITS, PLAN) == stored + 7 + 3
    assert mix_peak_bytes(UNITS, PLAN, in_flight=3) == mix_peak_bytes(UNITS, PLAN) + 2 * (stored + 7 + 3)
    assert mix_seconds(UNITS, PLAN) == 1 + (2 + 0.5 + 0.125) + (3 + 4) + 0.5


def test_a_table_names_what_becomes_of_the_bytes():
    rows = mix_rows(["(before)", "a", "b", "c"], UNITS, PLAN)
    assert [dict(zip(MIX_COLUMNS, row, strict=True)) for row in rows] == [
        dict(zip(MIX_COLUMNS, cells, strict=True))
        for cells in (
            ("(before)", "0", "0", "10", "0", "1000.00"),
            ("a to b", "4", "59", "2", "10 to 4", "9625.00"),
            ("c", "7", "0", "0", "8 to 3", "500.00"),
            ("all", "11", "59", "12", "18 to 7", "11125.00"),
        )
    ]


def alone(units, technique):
    """Units for which there is but one technique."""

    def limited(saved):
        times = saved.offload_seconds if technique == "offload" else None
        return Saved(saved.num_bytes, saved.compressed_bytes if technique == "compress" else None, 1.0, times)

    def part(tensors):
        return tuple(map(limited, tensors))

    return [
        Unit(
            part(u.arguments),
            u.is_saved,
            part(u.internal),
            part(u.after),
            u.seconds * (technique == "recompute") or None,
        )
        for u in units
    ]


def test_a_mix_meets_a_budget_that_no_technique_meets_alone():
    arguments, internal, after = (
        (Saved(8, offload_seconds=2.0),),
        (Saved(6, 3, 2.0, 3.0), Saved(10)),
        (Saved(4, 1, 1.0),),
    )
    units, budget = [Unit(arguments, (True,), internal, after, seconds=5.0)] * 3, 43
    for technique in ("recompute", "offload", "compress"):
        with pytest.raises(ValueError, match="at least"):
            cheapest_mix(alone(units, technique), budget)
    plan = cheapest_mix(units, budget)
    assert value(units, plan) == min(v for v in values_of(units, in_flight=1) if v[1] <= budget)
    ways = {way for unit, ways in zip(units, plan.ways, strict=True) for _, way in pairs_of(unit, ways)}
    assert ways == {"kept", "offloaded", "compressed", "dropped"}


@given(
    costs=st.lists(st.builds(BlockCost, BYTES, BYTES, BYTES, TIMES), max_size=7),
    in_flight=st.integers(1, 3),
    starts=st.sets(st.integers(1, 6), max_size=2),
    more=st.integers(0, 30),
)
def test_where_nothing_moves_or_is_compressed_plans_are_those_of_recomputation(costs, in_flight, starts, more):
    units = [
        Unit(
            (Saved(c.saved_inputs), Saved(max(0, c.boundary - c.saved_inputs))),
            (True, False),
            (Saved(c.internal),),
            (),
            c.seconds,
        )
        for c in costs
    ]
    costs = [BlockCost(max(c.boundary, c.saved_inputs), c.internal, c.saved_inputs, c.seconds) for c in costs]
    smallest = smallest_mix_budget(units, in_flight, starts)
    assert smallest == smallest_budget(costs, in_flight, starts)
    plan = cheapest_mix(units, smallest + more, in_flight, starts)
    segments = cheapest_segments(costs, smallest + more, in_flight, starts)
    assert value(units, plan, in_flight) == (extra_seconds(costs, segments), peak_bytes(costs, segments, in_flight))


@given(sizes=st.lists(st.integers(0, 20), max_size=8), in_flight=st.integers(1, 3), more=st.integers(0, 60))
def test_where_all_can_only_move_plans_are_those_of_offloading(sizes, in_flight, more):
    units = [Unit(internal=(Saved(size, offload_seconds=size),)) for size in sizes]
    smallest = smallest_mix_budget(units, in_flight)
    assert smallest == smallest_offload_budget(sizes)
    plan = cheapest_mix(units, smallest + more, in_flight)
    offloaded = cheapest_offload(sizes, smallest + more, in_flight)
    moved = sum(size for size, is_offloaded in zip(sizes, offloaded, strict=True) if is_offloaded)
    assert value(units, plan, in_flight) == (moved, offloaded_peak_bytes(sizes, offloaded, in_flight))


def large_units(seed, num_units, num_tensors):
    draw = random.Random(seed)

    def saved():
        size = draw.randint(10**6, 10**8)
        encoded = draw.choice([None, draw.randint(size // 10, size // 2)])
        return Saved(size, encoded, size / 1e11 * draw.uniform(0.5, 2), size / 2e10)

    def tensors(count):
        return tuple(saved() for _ in range(count))

    return [
        Unit(tensors(1), (True,), tensors(num_tensors - 3), tensors(2), draw.uniform(0.02, 0.06))
        for _ in range(num_units)
    ]


@pytest.mark.parametrize("units", [large_units(0, 40, 12), large_units(1, 1, 30) * 48], ids=["unequal", "equal"])
def test_plans_of_large_models_keep_to_budgets_and_cost_less_than_recomputation_alone(units):
    recompute = alone(units, "recompute")
    smallest, recomputed = smallest_mix_budget(units), smallest_mix_budget(recompute)
    everything = sum(saved.num_bytes for unit in units for saved in (*unit.arguments, *unit.internal, *unit.after))
    budgets = [smallest, (recomputed + everything) // 2]
    plans = [cheapest_mix(units, budget) for budget in budgets]
    assert smallest < recomputed // 2
    assert all(mix_peak_bytes(units, plan) <= budget for plan, budget in zip(plans, budgets, strict=True))
    assert mix_seconds(units, plans[1]) < mix_seconds(recompute, cheapest_mix(recompute, budgets[1]))


@pytest.mark.parametrize(
    "unit",
    [
        Unit(internal=(Saved(-1),)),
        Unit(after=(Saved(1, -1),)),
        Unit((Saved(1, 1, math.nan),), (True,)),
        Unit((Saved(1, offload_seconds=math.inf),), (True,)),
        Unit(seconds=-1.0),
    ],
)
def test_costs_that_are_none_are_refused(unit):
    for search in (smallest_mix_budget, partial(cheapest_mix, budget_bytes=100)):
        with pytest.raises(ValueError, match="finite and not negative"):
            search([unit])


def test_other_mistakes_are_refused():
    with pytest.raises(ValueError, match="each of 1 arguments"):
        smallest_mix_budget([Unit((Saved(1),))])
    with pytest.raises(ValueError, match="in_flight=0"):
        cheapest_mix([], 1, in_flight=0)
