from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from lightning_hybrid.functional.schedules import (
    Action,
    Kind,
    choose,
    forward_only,
    gpipe,
    interleaved_1f1b,
    one_forward_one_backward,
    usable_microbatches,
)

SIGNS = {Kind.FORWARD: "F", Kind.BACKWARD: "B"}
TORCH_SIGNS = {"forward_one_chunk": "F", "backward_one_chunk": "B"}


def named(schedule):
    """Actions as torch names them: stage, sign, micro-batch."""
    return [[f"{a.stage}{SIGNS[a.kind]}{a.micro_batch}" for a in row] for row in schedule]


def executed(schedule, p, m):
    """What torch's schedule calls on each rank's stage; 1F1B's own list numbers the last stage's forwards from 1."""
    rows = []
    for rank in range(p):
        stage = MagicMock(num_stages=p, stage_index=rank, is_last=False, device="cpu")
        for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
            getattr(stage, name).return_value = []
        schedule(stage, m, loss_fn=MagicMock()).step()
        rows.append([f"{rank}{TORCH_SIGNS[name]}{a[0]}" for name, a, _ in stage.method_calls if name in TORCH_SIGNS])
    return rows


@pytest.mark.parametrize(("p", "m"), [(p, m) for p in range(1, 7) for m in range(1, 13)])
def test_gpipe_is_torchs_order(p, m):
    assert named(gpipe(p, m)) == executed(ScheduleGPipe, p, m)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p in range(1, 7) for m in range(p, 13)])
def test_one_forward_one_backward_is_torchs_order(p, m):
    assert named(one_forward_one_backward(p, m)) == executed(Schedule1F1B, p, m)


@pytest.mark.parametrize("v", range(1, 5))
@pytest.mark.parametrize(("p", "m"), [(p, m) for p in range(1, 7) for m in range(p, 13, p)])
def test_interleaved_is_torchs_order(p, m, v):
    stages = [
        SimpleNamespace(num_stages=p * v, group_size=p, group_rank=0, stage_index=chunk * p, is_last=False)
        for chunk in range(v)
    ]
    order = ScheduleInterleaved1F1B(stages, m).pipeline_order
    expected = [[str(a) for a in order[rank] if a is not None and a.is_compute_op] for rank in range(p)]
    assert named(interleaved_1f1b(p, m, v)) == expected


def test_1f1b_with_fewer_micro_batches_than_ranks_starts_no_forward_that_does_not_exist():
    assert named(one_forward_one_backward(4, 2)) == [
        ["0F0", "0F1", "0B0", "0B1"],
        ["1F0", "1F1", "1B0", "1B1"],
        ["2F0", "2F1", "2B0", "2B1"],
        ["3F0", "3B0", "3F1", "3B1"],
    ]


def test_gpipe_with_chunks_takes_one_chunk_after_the_other():
    assert named(gpipe(2, 2, v=2))[1] == ["1F0", "1F1", "3F0", "3F1", "3B0", "3B1", "1B0", "1B1"]


@pytest.mark.parametrize(("p", "m", "v"), [(1, 1, 1), (3, 2, 2), (4, 8, 3)])
def test_forward_only_is_the_first_half_of_gpipe(p, m, v):
    assert forward_only(p, m, v) == [row[: m * v] for row in gpipe(p, m, v)]


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "expected"),
    [
        ("auto", 4, 8, 1, one_forward_one_backward(4, 8)),
        ("auto", 4, 8, 2, interleaved_1f1b(4, 8, 2)),
        ("1f1b", 4, 3, 1, one_forward_one_backward(4, 3)),
        ("gpipe", 4, 8, 2, gpipe(4, 8, 2)),
        ("interleaved_1f1b", 4, 8, 2, interleaved_1f1b(4, 8, 2)),
        ("interleaved_1f1b", 4, 6, 1, one_forward_one_backward(4, 6)),
        ("interleaved_1f1b", 4, 6, 2, gpipe(4, 6, 2)),
        ("auto", 4, 3, 2, gpipe(4, 3, 2)),
    ],
)
def test_choose_gives_what_the_name_means_and_gpipes_order_where_interleaving_cannot_run(name, p, m, v, expected):
    assert choose(name, p, m, v) == expected


def test_action_names_itself():
    assert str(Action(Kind.RECV_BACKWARD, 2, 5)) == "RECV_BACKWARD(stage 2, micro-batch 5)"


@pytest.mark.parametrize(
    ("name", "p", "v", "wanted", "batch_size", "expected"),
    [
        ("1f1b", 4, 1, 8, 32, 8),
        ("1f1b", 4, 1, 8, 5, 5),
        ("gpipe", 4, 2, 7, 32, 7),
        ("interleaved_1f1b", 4, 2, 8, 32, 8),
        ("interleaved_1f1b", 4, 2, 8, 7, 4),
        ("interleaved_1f1b", 4, 2, 10, 32, 8),
        ("interleaved_1f1b", 4, 2, 8, 3, 3),
        ("interleaved_1f1b", 4, 1, 8, 7, 7),
        ("auto", 4, 2, 8, 7, 4),
        ("auto", 4, 1, 8, 1, 1),
    ],
)
def test_usable_microbatches_fit_the_batch_and_the_schedule(name, p, v, wanted, batch_size, expected):
    assert usable_microbatches(name, p, v, wanted, batch_size) == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gpipe(0, 1), r"pipeline ranks is 0"),
        (lambda: one_forward_one_backward(1, 0), r"micro-batches is 0"),
        (lambda: choose("auto", 2, 2, 0), r"chunks a rank is 0"),
        (lambda: choose("auto", 0, 2, 2), r"pipeline ranks is 0"),
        (lambda: interleaved_1f1b(4, 6, 2), r"m=6 and p=4. Use 4 micro-batches"),
        (lambda: interleaved_1f1b(4, 3, 2), r"m=3 and p=4. Use 4 micro-batches"),
        (lambda: choose("zero_bubble", 2, 2), r"'zero_bubble'. Use one of 'auto', 'gpipe', '1f1b'"),
        (lambda: choose("1f1b", 2, 2, 3), r"one chunk a rank, got 3. Use 'interleaved_1f1b'"),
        (lambda: usable_microbatches("1f1b", 2, 1, 4, 0), r"batch_size=0"),
        (lambda: usable_microbatches("1f1b", 2, 1, 0, 4), r"micro-batches is 0"),
        (lambda: usable_microbatches("1f1b", 2, 2, 4, 4), r"one chunk a rank, got 2"),
    ],
)
def test_what_cannot_run_is_refused_with_its_values(make, message):
    with pytest.raises(ValueError, match=message):
        make()
