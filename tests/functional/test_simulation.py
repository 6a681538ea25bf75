from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.functional.lowering import lower
from lightning_hybrid.functional.schedules import Action, Kind, choose, forward_only, gpipe, one_forward_one_backward
from lightning_hybrid.functional.simulation import (
    simulate,
    theoretical_bubble_ratio,
    theoretical_bubble_share,
)

F, B = Kind.FORWARD, Kind.BACKWARD
SF, RF = Kind.SEND_FORWARD, Kind.RECV_FORWARD
MATCHINGS = [(matching, rendezvous) for matching in ("ordered", "tagged") for rendezvous in (False, True)]
each_matching = pytest.mark.parametrize(("matching", "rendezvous"), MATCHINGS)


def run(name, p, m, v=1, **options):
    """One step whose ranks need 1 and 2 for all their layers, however many chunks they make."""
    programs = lower(choose(name, p, m, v), p * v)
    return simulate(programs, forward_time=1 / v, backward_time=2 / v, **options)


@pytest.mark.parametrize(
    ("p", "m", "share", "end_time", "peak"),
    [
        (2, 4, 1 / 5, 15, [2, 1]),
        (4, 4, 3 / 7, 21, [4, 3, 2, 1]),
        (4, 8, 3 / 11, 33, [4, 3, 2, 1]),
        (4, 16, 3 / 19, 57, [4, 3, 2, 1]),
        (8, 32, 7 / 39, 117, [8, 7, 6, 5, 4, 3, 2, 1]),
    ],
)
def test_gpipe_and_1f1b_end_together_and_1f1b_holds_less(p, m, share, end_time, peak):
    first, second = run("gpipe", p, m), run("1f1b", p, m)
    assert first.bubble_share == second.bubble_share == theoretical_bubble_share(p, m) == share
    assert first.end_time == second.end_time == end_time
    assert first.peak_in_flight == [m] * p
    assert second.peak_in_flight == peak
    assert second.busy == [3 * m] * p


@pytest.mark.parametrize(
    ("p", "m", "share", "end_time", "peak"),
    [
        (2, 4, 1 / 9, 27 / 2, [5, 3]),
        (4, 4, 3 / 11, 33 / 2, [8, 8, 7, 5]),
        (4, 8, 3 / 19, 57 / 2, [11, 9, 7, 5]),
        (4, 16, 3 / 35, 105 / 2, [11, 9, 7, 5]),
        (8, 32, 7 / 71, 213 / 2, [23, 21, 19, 17, 15, 13, 11, 9]),
    ],
)
def test_two_interleaved_chunks_halve_the_bubble(p, m, share, end_time, peak):
    simulation = run("interleaved_1f1b", p, m, v=2)
    assert simulation.bubble_share == theoretical_bubble_share(p, m, 2) == share
    assert simulation.bubble_ratio == theoretical_bubble_ratio(p, m, 2) == (p - 1) / (2 * m)
    assert simulation.end_time == end_time
    assert simulation.peak_in_flight == peak


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("p", [1, 2, 4, 7])
def test_one_micro_batch_is_the_naive_split_with_one_rank_busy_at_a_time(name, p):
    simulation = run(name, p, m=1)
    assert simulation.bubble_share == (p - 1) / p
    assert simulation.peak_in_flight == [1] * p
    compute = sorted((e for e in simulation.events if e.action.kind in (F, B)), key=lambda e: e.start)
    assert all(before.end == after.start for before, after in pairwise(compute))


@given(p=st.integers(1, 6), m=st.integers(1, 12), v=st.integers(1, 4), name=st.sampled_from(["gpipe", "auto"]))
def test_simulation_agrees_with_theory_whatever_the_sizes(p, m, v, name):
    simulation = simulate(lower(choose(name, p, m, v), p * v), forward_time=1.0, backward_time=3.0)
    assert simulation.bubble_share == theoretical_bubble_share(p, m, v)
    assert simulation.bubble_ratio == theoretical_bubble_ratio(p, m, v)
    if m >= p or v == 1:
        assert simulation.bubble_share == (p - 1) / (v * m + p - 1)
        assert simulation.bubble_ratio == (p - 1) / (v * m)


@given(
    p=st.integers(1, 6), chunks=st.integers(2, 4), rounds=st.integers(1, 3), forward=st.sampled_from([0.5, 1.0, 4.0])
)
def test_peak_in_flight_of_interleaving_is_its_warm_up_plus_one(p, chunks, rounds, forward):
    m = rounds * p
    simulation = simulate(lower(choose("auto", p, m, chunks), p * chunks), forward_time=forward)
    expected = [min(2 * (p - rank - 1) + (chunks - 1) * p + 1, m * chunks) for rank in range(p)]
    assert simulation.peak_in_flight == expected


@given(data=st.data(), p=st.integers(1, 6), m=st.integers(1, 12), v=st.integers(1, 4))
def test_no_program_hangs_and_none_breaks_its_dependencies_with_any_times(data, p, m, v):
    programs = lower(choose(data.draw(st.sampled_from(["gpipe", "auto"])), p, m, v), p * v)
    times = st.lists(st.integers(0, 5), min_size=p * v, max_size=p * v)
    forward, backward, transfer = data.draw(times), data.draw(times), data.draw(times)
    matching, rendezvous = data.draw(st.sampled_from(MATCHINGS))
    simulation = simulate(
        programs,
        forward_time=forward,
        backward_time=backward,
        transfer_time=transfer,
        matching=matching,
        rendezvous=rendezvous,
    )
    end = {event.action: event.end for event in simulation.events}
    start = {event.action: event.start for event in simulation.events}
    for i in range(m):
        for early, late in ((s, s + 1) for s in range(p * v - 1)):
            delay = transfer[early] if p > 1 else 0
            assert start[Action(F, late, i)] >= end[Action(F, early, i)] + delay
            assert start[Action(B, early, i)] >= end[Action(B, late, i)] + delay
        assert start[Action(B, p * v - 1, i)] >= end[Action(F, p * v - 1, i)]
    assert simulation.busy == [m * sum(forward[r::p] + backward[r::p]) for r in range(p)]
    assert simulation.end_time == max(end.values())


def test_two_ranks_by_hand():
    simulation = simulate(
        lower(one_forward_one_backward(2, 1), 2), forward_time=[1, 2], backward_time=[3, 4], transfer_time=[5, 0]
    )
    assert [(e.rank, str(e.action), e.start, e.end) for e in simulation.events] == [
        (0, "FORWARD(stage 0, micro-batch 0)", 0, 1),
        (0, "SEND_FORWARD(stage 0, micro-batch 0)", 1, 6),
        (1, "FORWARD(stage 1, micro-batch 0)", 6, 8),
        (1, "BACKWARD(stage 1, micro-batch 0)", 8, 12),
        (1, "SEND_BACKWARD(stage 1, micro-batch 0)", 12, 17),
        (0, "BACKWARD(stage 0, micro-batch 0)", 17, 20),
    ]
    assert simulation.busy == [4, 6]
    assert (simulation.bubble_share, simulation.bubble_ratio) == (30 / 40, 30 / 10)


def test_lookahead_hides_transfers_that_need_both_ends():
    schedule = one_forward_one_backward(2, 8)
    late, early = (
        simulate(lower(schedule, 2, lookahead), transfer_time=1, rendezvous=True).end_time for lookahead in (0, 1)
    )
    assert early < late


def test_a_channel_that_keeps_order_carries_one_message_at_a_time():
    programs = lower(forward_only(2, 3), 2)
    times = {"forward_time": [0, 1], "transfer_time": 10}
    assert simulate(programs, matching="ordered", **times).end_time == 31
    assert simulate(programs, matching="tagged", **times).end_time == 13


def test_rendezvous_waits_for_the_receive():
    programs = lower(gpipe(2, 2), 2, lookahead=0)
    times = {"forward_time": [0, 5], "backward_time": 0, "transfer_time": 1}
    assert simulate(programs, **times).end_time == 1 + 5 + 5 + 1 + 1
    assert simulate(programs, rendezvous=True, **times).end_time == 1 + 5 + 1 + 5 + 1 + 1


@each_matching
def test_a_forward_only_program_keeps_nothing(matching, rendezvous):
    simulation = simulate(lower(forward_only(4, 8, 2), 8), matching=matching, rendezvous=rendezvous)
    assert simulation.peak_in_flight == [0] * 4
    assert simulation.end_time == 2 * 8 + 3


def test_a_step_without_time_has_no_bubble():
    simulation = simulate(lower(gpipe(2, 2), 2), forward_time=0, backward_time=0)
    assert (simulation.end_time, simulation.bubble_share, simulation.bubble_ratio) == (0, 0, 0)


@each_matching
def test_ranks_that_wait_for_one_another_are_a_deadlock_with_both_names(matching, rendezvous):
    good = lower(one_forward_one_backward(2, 2), 2)
    crossed = [
        sorted(good[0], key=lambda a: (a.micro_batch, a.kind not in (F, SF))),  # wants its backward 0 before forward 1
        sorted(good[1], key=lambda a: a.kind not in (F, RF)),  # wants forward 1 before its backward 0
    ]
    with pytest.raises(RuntimeError, match=r"rank 0 at BACKWARD\(stage 0, .* 0\), rank 1 at FORWARD\(stage 1, .* 1\)"):
        simulate(crossed, matching=matching, rendezvous=rendezvous)


def swapped_receives():
    sender, receiver = lower(forward_only(2, 2), 2)
    ahead = [Action(RF, 1, 1), Action(RF, 1, 0)]
    return [sender, ahead + [action for action in receiver if action.kind is F]]


def test_in_order_a_receive_that_means_another_message_is_refused_by_name():
    with pytest.raises(
        RuntimeError, match=r"SEND_FORWARD\(stage 0, .* 0\) would be taken by RECV_FORWARD\(stage 1, .* 1"
    ):
        simulate(swapped_receives(), matching="ordered")


def test_by_tag_the_same_program_runs():
    assert simulate(swapped_receives(), matching="tagged").end_time == 3


@each_matching
@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (Action(SF, 0, 1), r"deadlock: rank 0 at BACKWARD.*, rank 1 at FORWARD\(stage 1, micro-batch 1\)"),
        (Action(RF, 1, 1), r"deadlock: rank 0 at BACKWARD.*, rank 1 at FORWARD\(stage 1, micro-batch 1\)"),
        (Action(F, 1, 1), r"deadlock: rank 0 at BACKWARD.*, rank 1 at BACKWARD\(stage 1, micro-batch 1\)"),
    ],
)
def test_a_missing_action_is_noticed_where_another_needs_it(lost, message, matching, rendezvous):
    programs = [[a for a in program if a != lost] for program in lower(gpipe(2, 2), 2)]
    with pytest.raises(RuntimeError, match=message):
        simulate(programs, matching=matching, rendezvous=rendezvous)


@each_matching
@pytest.mark.parametrize(
    ("rank", "extra", "message"),
    [
        (0, Action(SF, 0, 2), r"SEND_FORWARD\(stage 0, micro-batch 2\) is never taken"),
        (1, Action(RF, 1, 2), r"RECV_FORWARD\(stage 1, micro-batch 2\) is never sent"),
    ],
)
def test_a_message_without_a_counterpart_is_named(rank, extra, message, matching, rendezvous):
    programs = lower(gpipe(2, 2), 2)
    programs[rank].append(extra)
    with pytest.raises(RuntimeError, match=message):
        simulate(programs, matching=matching, rendezvous=rendezvous)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forward_time": [1, 2, 3]}, r"forward_time=\[1, 2, 3\] must be one time, or 2 of them"),
        ({"backward_time": -1.0}, "backward_time=-1.0 must be"),
        ({"transfer_time": float("nan")}, "transfer_time=nan must be"),
        ({"matching": "fifo"}, "matching='fifo' is unknown. Use 'ordered' or 'tagged'"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        simulate(lower(gpipe(2, 2), 2), **options)


@pytest.mark.parametrize("theory", [theoretical_bubble_share, theoretical_bubble_ratio])
def test_theory_refuses_sizes_below_one(theory):
    with pytest.raises(ValueError, match="p=2, m=0, v=1"):
        theory(2, 0)
