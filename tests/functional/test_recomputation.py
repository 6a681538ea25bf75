import math
import random
from functools import cache
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.functional.recomputation import cheapest_segments, smallest_budget, square_root_segments
from lightning_hybrid.functional.segments import (
    PLAN_COLUMNS,
    BlockCost,
    Segment,
    extra_seconds,
    peak_bytes,
    plan_rows,
)

BYTES = st.integers(0, 9)
COSTS = st.lists(st.builds(BlockCost, BYTES, BYTES, BYTES, st.integers(0, 5)), max_size=6)


@cache
def every_plan(num_blocks):
    plans = []
    for num_cuts in range(num_blocks):
        for cuts in combinations(range(1, num_blocks), num_cuts):
            bounds = list(pairwise((0, *cuts, num_blocks)))
            single = [i for i, (start, stop) in enumerate(bounds) if stop - start == 1]
            for kept in (set(some) for size in range(len(single) + 1) for some in combinations(single, size)):
                plans.append([Segment(start, stop, i not in kept) for i, (start, stop) in enumerate(bounds)])
    return plans or [[]]


def sizes(costs, segment):
    """Bytes that a segment stores, and those of its backward, written down as they are defined."""
    blocks = costs[segment.start : segment.stop]
    if not segment.recomputed:
        return (blocks[0].internal + blocks[0].saved_inputs,) * 2
    saved = sum(block.internal for block in blocks) + sum(block.saved_inputs for block in blocks[1:])
    return blocks[0].boundary, blocks[0].boundary + saved


def random_costs(seed, num_blocks):
    draw = random.Random(seed)
    return [
        BlockCost(draw.randint(10**6, 10**7), draw.randint(10**7, 10**8), draw.randint(0, 10**6), draw.random())
        for _ in range(num_blocks)
    ]


@given(costs=COSTS, pick=st.integers(0, 10**6), in_flight=st.integers(1, 3))
def test_the_peak_is_that_of_the_segment_with_the_most_before_it(costs, pick, in_flight):
    plans = every_plan(len(costs))
    plan = plans[pick % len(plans)]
    stored, full = zip(*(sizes(costs, segment) for segment in plan), strict=True) if plan else ((), ())
    peak = max((sum(stored[:i]) + full[i] for i in range(len(plan))), default=0)
    assert peak_bytes(costs, plan, in_flight) == (in_flight - 1) * sum(stored) + peak


@pytest.mark.parametrize(("boundary", "internal"), [(1, 1), (3, 8), (4096, 65536), (10, 0), (0, 7)])
def test_equal_blocks_need_the_bytes_of_the_formula_at_the_peak(boundary, internal):
    for num_blocks in range(1, 65):
        costs = [BlockCost(boundary, internal)] * num_blocks
        formula = min(k * boundary + math.ceil(num_blocks / k) * internal for k in range(1, num_blocks + 1))
        segments = square_root_segments(costs)
        assert peak_bytes(costs, segments) == formula
        assert all(segment.recomputed for segment in segments)
        assert [s.stop - s.start for s in segments] == sorted(s.stop - s.start for s in segments)


STARTS = st.sets(st.integers(1, 5), max_size=2)


def begins_with(starts):
    """Whether a plan has no segment over one of these blocks."""
    return lambda plan: not any(start in range(s.start + 1, s.stop) for s in plan for start in starts)


@given(costs=COSTS, starts=STARTS)
def test_square_root_segments_are_the_best_of_all_that_recompute(costs, starts):
    def badness(plan):
        boundaries = [costs[s.start].boundary for s in plan]
        inner = [sizes(costs, s)[1] - costs[s.start].boundary for s in plan]
        lengths = [s.stop - s.start for s in plan]
        squares = sum(length**2 for length in lengths)
        return sum(boundaries) + max(inner, default=0), sum(boundaries), len(plan), squares, lengths

    every = [plan for plan in every_plan(len(costs)) if all(segment.recomputed for segment in plan)]
    assert square_root_segments(costs, starts) == min(filter(begins_with(starts), every), key=badness)


@given(costs=COSTS, in_flight=st.integers(1, 3), starts=STARTS)
def test_the_smallest_budget_is_that_of_the_best_of_all_plans(costs, in_flight, starts):
    plans = filter(begins_with(starts), every_plan(len(costs)))
    assert smallest_budget(costs, in_flight, starts) == min(peak_bytes(costs, plan, in_flight) for plan in plans)


@given(costs=COSTS, room=st.integers(0, 60), in_flight=st.integers(1, 3), starts=STARTS)
def test_a_plan_under_a_budget_is_the_best_of_all_plans(costs, room, in_flight, starts):
    budget = smallest_budget(costs, in_flight, starts) + room

    def badness(plan):
        return extra_seconds(costs, plan), peak_bytes(costs, plan, in_flight)

    fitting = [plan for plan in every_plan(len(costs)) if peak_bytes(costs, plan, in_flight) <= budget]
    found = cheapest_segments(costs, budget, in_flight, starts)
    assert begins_with(starts)(found)
    assert badness(found) == min(map(badness, filter(begins_with(starts), fitting)))


@pytest.mark.parametrize("in_flight", [1, 2])
def test_more_bytes_never_cost_more_time(in_flight):
    costs = random_costs(0, 10)
    smallest, everything = smallest_budget(costs, in_flight), in_flight * sum(block.kept for block in costs)
    budgets = range(smallest, everything, (everything - smallest) // 40)
    times = [extra_seconds(costs, cheapest_segments(costs, budget, in_flight)) for budget in (*budgets, everything)]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1] == 0


@given(costs=COSTS.filter(lambda costs: any(block.internal for block in costs)), in_flight=st.integers(1, 3))
def test_a_budget_below_the_smallest_is_refused_by_its_name(costs, in_flight):
    smallest = smallest_budget(costs, in_flight)
    with pytest.raises(ValueError, match=rf"budget_bytes={smallest - 1}: .* Allow {smallest} or more"):
        cheapest_segments(costs, smallest - 1, in_flight)
    assert peak_bytes(costs, cheapest_segments(costs, smallest, in_flight), in_flight) == smallest


@pytest.mark.parametrize("in_flight", [1, 3])
def test_unequal_blocks_keep_to_the_budget(in_flight):
    costs = random_costs(1, 30)
    smallest, everything = smallest_budget(costs, in_flight), in_flight * sum(block.kept for block in costs)
    for budget in (smallest, (smallest + everything) // 2):
        segments = cheapest_segments(costs, budget, in_flight)
        assert [s.start for s in segments] == [0, *(s.stop for s in segments[:-1])]
        assert segments[-1].stop == 30
        assert peak_bytes(costs, segments, in_flight) <= budget


@pytest.mark.parametrize(
    ("wrong", "in_flight", "message"),
    [
        (BlockCost(-1, 0), 1, r"finite and not negative, got BlockCost\(boundary=-1"),
        (BlockCost(1, 1, 1, math.inf), 1, "finite and not negative, got .*seconds=inf"),
        (BlockCost(1, 1), 0, "in_flight=0: at least one micro-batch"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, in_flight, message):
    with pytest.raises(ValueError, match=message):
        cheapest_segments([wrong], 100, in_flight)


def test_a_table_has_a_row_for_each_recomputed_segment_and_each_run_of_kept_blocks():
    costs = [BlockCost(1000, 6000, 500, 0.004)] * 6
    segments = [Segment(0, 2, True), Segment(2, 3, True), *(Segment(i, i + 1, False) for i in range(3, 6))]
    rows = plan_rows([f"blocks.{i}" for i in range(6)], costs, segments)
    assert rows == [
        ("blocks.0 to blocks.1", "recomputed", "1,000", "13,500", "8.00"),
        ("blocks.2", "recomputed", "1,000", "7,000", "4.00"),
        ("blocks.3 to blocks.5", "kept", "19,500", "19,500", "0.00"),
        ("all", "", "21,500", "21,500 at most", "12.00"),
    ]
    assert {len(row) for row in rows} == {len(PLAN_COLUMNS)}
