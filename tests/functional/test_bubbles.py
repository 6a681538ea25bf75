"""Idle parts of pipelines' steps: the papers' equations, sums by hand, and clocks that differ."""

import pytest

from lightning_hybrid.functional.bubbles import bubble_ratio, bubble_share, pipeline_times, scheduled
from lightning_hybrid.functional.lowering import lower
from lightning_hybrid.functional.schedules import Action, Kind, choose, forward_only
from lightning_hybrid.functional.simulation import simulate

F, B = Kind.FORWARD, Kind.BACKWARD


def programs(name, p, m, v=1):
    return lower(choose(name, p, m, v), p * v)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 4), (4, 8), (8, 32)])
def test_equal_stages_idle_as_the_papers_say(name, p, m):
    v = 2 if name == "interleaved_1f1b" else 1
    busy, total = pipeline_times(simulate(programs(name, p, m, v)).events)
    assert bubble_share(busy, total) == pytest.approx((p - 1) / (v * m + p - 1), rel=1e-12)
    assert bubble_ratio(busy, total) == pytest.approx((p - 1) / (v * m), rel=1e-12)


def test_a_step_reaches_from_its_first_action_to_its_last_one():
    transfer = Action(Kind.SEND_FORWARD, 0, 0)
    events = [(0, Action(F, 0, 0), 10.0, 11.0), (0, transfer, 11.0, 99.0), (0, Action(B, 0, 0), 18.0, 20.0)]
    events += [(1, Action(F, 1, 0), 13.0, 14.0), (1, Action(B, 1, 0), 14.5, 17.5)]
    assert pipeline_times(events) == (1 + 2 + 1 + 3, 2 * (20 - 10))
    assert bubble_share(7, 20) == 13 / 20
    assert bubble_ratio(7, 20) == 13 / 7


def test_one_rank_waits_for_nobody_and_nothing_has_no_bubble():
    events = [(0, Action(F, 0, 0), 0.0, 1.0), (0, Action(B, 0, 0), 5.0, 7.0)]
    assert pipeline_times(events) == (3, 3)
    assert pipeline_times([]) == (0, 0)
    assert scheduled([]) == []
    assert bubble_share(0, 0) == bubble_ratio(0, 0) == 0


@pytest.mark.parametrize("late", [-1000.0, 1000.0])
def test_clocks_that_differ_are_refused(late):
    events = [(r, a, s + late * r, e + late * r) for r, a, s, e in simulate(programs("1f1b", 2, 4)).events]
    with pytest.raises(ValueError, match=r"starts at .* on pipeline rank .*, and its input .* their clocks differ"):
        pipeline_times(events)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b"])
def test_what_the_schedule_leaves_idle_is_without_transfers_and_changes(name):
    v = 2 if name == "interleaved_1f1b" else 1
    stages = {"forward_time": [1.0, 2.0, 4.0, 1.0][: 2 * v], "backward_time": [2.0, 3.0, 5.0, 8.0][: 2 * v]}
    slow = simulate(programs(name, 2, 6, v), **stages, transfer_time=0.75)
    free = simulate(programs(name, 2, 6, v), **stages)
    again = scheduled(slow.events)
    assert pipeline_times(again) == (sum(free.busy), 2 * free.end_time)
    assert pipeline_times(slow.events)[1] > pipeline_times(again)[1]
    evaluation = simulate(lower(forward_only(2, 3, v), 2 * v), forward_time=stages["forward_time"])
    assert pipeline_times(scheduled(evaluation.events)) == (sum(evaluation.busy), 2 * evaluation.end_time)
