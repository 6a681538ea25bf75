import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.functional.lowering import Channel, channel_of, counterpart, lower, validate
from lightning_hybrid.functional.schedules import Action, Kind, choose, forward_only, one_forward_one_backward
from lightning_hybrid.functional.simulation import simulate

F, B = Kind.FORWARD, Kind.BACKWARD
SF, RF, SB, RB = Kind.SEND_FORWARD, Kind.RECV_FORWARD, Kind.SEND_BACKWARD, Kind.RECV_BACKWARD
SHORT = {F: "F", B: "B", SF: "SF", RF: "RF", SB: "SB", RB: "RB"}


def row(text):
    """Read ``F0.1``: the forward of stage 0 on micro-batch 1."""
    kinds = {short: kind for kind, short in SHORT.items()}
    words = [word.split(".") for word in text.split()]
    return [Action(kinds[head.rstrip("0123456789")], int(head.lstrip("FBSR")), int(i)) for head, i in words]


def written(programs):
    return [" ".join(f"{SHORT[a.kind]}{a.stage}.{a.micro_batch}" for a in program) for program in programs]


def test_receives_are_posted_one_action_ahead_and_sends_follow_their_computation():
    assert written(lower(one_forward_one_backward(2, 2), num_stages=2)) == [
        "F0.0 SF0.0 RB0.0 F0.1 SF0.1 RB0.1 B0.0 B0.1",
        "RF1.0 F1.0 RF1.1 B1.0 SB1.0 F1.1 B1.1 SB1.1",
    ]


def test_without_lookahead_a_receive_stands_right_before_its_use():
    assert written(lower(one_forward_one_backward(2, 2), num_stages=2, lookahead=0)) == [
        "F0.0 SF0.0 F0.1 SF0.1 RB0.0 B0.0 RB0.1 B0.1",
        "RF1.0 F1.0 B1.0 SB1.0 RF1.1 F1.1 B1.1 SB1.1",
    ]


def test_a_forward_only_schedule_sends_no_gradients():
    assert written(lower(forward_only(2, 1, v=2), num_stages=4)) == [
        "RF2.0 F0.0 SF0.0 F2.0 SF2.0",
        "RF1.0 RF3.0 F1.0 SF1.0 F3.0",
    ]


@pytest.mark.parametrize("v", [1, 3])
def test_one_rank_needs_no_communication(v):
    schedule = choose("auto", 1, 4, v)
    assert lower(schedule, num_stages=v) == schedule


def test_a_receiver_that_computes_in_another_order_still_posts_in_the_senders():
    schedule = [row("F0.0 F0.1 F0.2 B0.0 B0.1 B0.2"), row("F1.0 F1.2 F1.1 B1.0 B1.1 B1.2")]
    programs = lower(schedule, num_stages=2, lookahead=0)
    assert written(programs)[1].startswith("RF1.0 F1.0 RF1.1 RF1.2 F1.2 F1.1 ")
    assert simulate(programs, matching="ordered", rendezvous=True).end_time == simulate(programs).end_time


@pytest.mark.parametrize(
    ("action", "channel"),
    [
        (Action(SF, 1, 0), Channel(forward=True, wrap=False, source=1, target=2)),
        (Action(RF, 2, 0), Channel(forward=True, wrap=False, source=1, target=2)),
        (Action(SF, 3, 0), Channel(forward=True, wrap=True, source=3, target=0)),
        (Action(RF, 4, 0), Channel(forward=True, wrap=True, source=3, target=0)),
        (Action(SB, 2, 0), Channel(forward=False, wrap=False, source=2, target=1)),
        (Action(RB, 5, 0), Channel(forward=False, wrap=False, source=2, target=1)),
        (Action(SB, 4, 0), Channel(forward=False, wrap=True, source=0, target=3)),
        (Action(RB, 3, 0), Channel(forward=False, wrap=True, source=0, target=3)),
    ],
)
def test_channels_of_four_ranks(action, channel):
    assert channel_of(action, 4) == channel


def test_two_ranks_with_chunks_keep_their_four_channels_apart():
    actions = Action(SF, 0, 0), Action(SF, 1, 0), Action(SB, 1, 0), Action(SB, 2, 0)
    assert len({channel_of(action, 2) for action in actions}) == 4


@given(kind=st.sampled_from([SF, RF, SB, RB]), stage=st.integers(1, 20), i=st.integers(0, 9), p=st.integers(2, 8))
def test_both_ends_of_a_message_name_the_same_channel_and_each_other(kind, stage, i, p):
    action = Action(kind, stage, i)
    other = counterpart(action)
    assert counterpart(other) == action
    assert channel_of(other, p) == channel_of(action, p)
    assert {channel_of(action, p).source, channel_of(action, p).target} == {stage % p, other.stage % p}


@pytest.mark.parametrize("function", [lambda action: channel_of(action, 2), counterpart])
def test_computation_has_no_channel_and_no_counterpart(function):
    with pytest.raises(ValueError, match=r"FORWARD\(stage 0, micro-batch 3\) computes"):
        function(Action(F, 0, 3))


@given(
    p=st.integers(1, 6),
    m=st.integers(1, 12),
    v=st.integers(1, 4),
    name=st.sampled_from(["gpipe", "auto", "forward_only"]),
    lookahead=st.integers(0, 5),
)
def test_every_program_is_complete_in_order_and_runs_to_its_end(p, m, v, name, lookahead):
    schedule = forward_only(p, m, v) if name == "forward_only" else choose(name, p, m, v)
    programs = lower(schedule, p * v, lookahead)
    assert [[a for a in program if a.kind in (F, B)] for program in programs] == schedule

    sent, posted = {}, {}
    for action in (a for program in programs for a in program):
        if action.kind in (SF, SB):
            sent.setdefault(channel_of(action, p), []).append(counterpart(action))
        elif action.kind in (RF, RB):
            posted.setdefault(channel_of(action, p), []).append(action)
    assert sent == posted
    directions = 1 if name == "forward_only" else 2
    assert sum(map(len, sent.values())) == (p > 1) * directions * m * (p * v - 1)

    ends = {
        simulate(programs, matching=matching, rendezvous=rendezvous).end_time
        for matching in ("ordered", "tagged")
        for rendezvous in (False, True)
    }
    assert len(ends) == 1  # free transfers arrive at once, so that no matching rule may cost time


GOOD = lower(one_forward_one_backward(2, 2), num_stages=2)
SWAPPED = [row("F0.0 SF0.0 F0.1 SF0.1 RB0.0 B0.0 RB0.1 B0.1"), row("RF1.1 RF1.0 F1.0 B1.0 SB1.0 F1.1 B1.1 SB1.1")]
CROSSED = [row("F0.0 SF0.0 RB0.0 B0.0 F0.1 SF0.1 RB0.1 B0.1"), row("RF1.0 F1.0 RF1.1 F1.1 B1.0 SB1.0 B1.1 SB1.1")]


def without(rank, text):
    (action,) = row(text)
    return [[a for a in program if i != rank or a != action] for i, program in enumerate(GOOD)]


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        ([GOOD[1], GOOD[0]], r"stages that rank 0 of 2 does not hold.*BACKWARD\(stage 1, micro-batch 0\)"),
        ([[*GOOD[0], GOOD[0][0]], GOOD[1]], r"twice: FORWARD\(stage 0, micro-batch 0\)"),
        (without(1, "B1.1"), r"missing: BACKWARD\(stage 1, micro-batch 1\)"),
        (without(0, "F0.0"), r"missing: FORWARD\(stage 0, micro-batch 0\)"),
        (without(0, "SF0.1"), r"communication is missing: SEND_FORWARD\(stage 0, micro-batch 1\)"),
        (without(1, "RF1.0"), r"communication is missing: RECV_FORWARD\(stage 1, micro-batch 0\)"),
        ([[*row("RF0.0"), *GOOD[0]], GOOD[1]], r"that nothing needs: RECV_FORWARD\(stage 0, micro-batch 0\)"),
        ([GOOD[0], row("F1.0 RF1.0 RF1.1 B1.0 SB1.0 F1.1 B1.1 SB1.1")], r"behind their use: RECV_FORWARD\(stage 1, mi"),
        ([row("SF0.0 F0.0 RB0.0 F0.1 SF0.1 RB0.1 B0.0 B0.1"), GOOD[1]], r"before their payload.*: SEND_FORWARD\(st"),
        (
            SWAPPED,
            r"another order than rank 0 sends: RECV_FORWARD\(stage 1, micro-batch 0\), RECV_FORWARD\(stage 1, mi",
        ),
        ([row("B0.0 F0.0")], r"wait for one another: .*BACKWARD\(stage 0, micro-batch 0\)"),
        (
            [row("F0.1 B0.1 F0.-1 B0.-1")],
            r"missing: BACKWARD\(stage 0, micro-batch 0\), FORWARD\(stage 0, micro-batch 0",
        ),
        ([row("F0.0 B0.0 F0.-1 B0.-1")], r"numbered from 0: BACKWARD\(stage 0, micro-batch -1\)"),
        (CROSSED, r"wait for one another: .*BACKWARD\(stage 0, micro-batch 0\)"),
    ],
)
def test_a_program_that_cannot_work_is_refused_with_the_names_of_its_actions(programs, message):
    with pytest.raises(ValueError, match=message):
        validate(programs, num_stages=len(programs))


def test_a_long_list_of_names_is_cut():
    with pytest.raises(ValueError, match=r"and 11 more\."):
        validate([row("F0.8"), []], num_stages=2)


@pytest.mark.parametrize(("programs", "num_stages"), [([], 1), (GOOD, 3), (GOOD, 0)])
def test_stages_must_be_dealt_in_equal_numbers(programs, num_stages):
    with pytest.raises(ValueError, match=rf"{num_stages} stages cannot be dealt to {len(programs)} ranks"):
        validate(programs, num_stages)


def test_negative_lookahead_is_refused():
    with pytest.raises(ValueError, match="lookahead=-1"):
        lower(one_forward_one_backward(2, 2), num_stages=2, lookahead=-1)
