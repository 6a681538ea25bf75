"""Optimizers for large batches: every layout gives the numbers of one process."""

import pytest
from torch.testing import assert_close

from tests.launch import run_trainers
from tests.optim.layouts import OPTIMIZERS, Row, go_on, save_all, train_all, train_all_twice

ROWS = [
    Row(data=2),
    *(Row(data=2, zero=zero) for zero in (1, 2, 3)),
    Row(data=2, zero=3, cpu_offload=True),
    Row(tensor=2),
    Row(pipeline=2),
    *(Row(data=2, expert=2, zero=zero) for zero in (0, 3)),
    *(Row(data=4, zero=zero) for zero in (1, 2, 3)),
    Row(data=4, zero=3, replicate=2),
    *(Row(data=2, tensor=2, zero=zero) for zero in (1, 3)),
    *(Row(data=4, expert=2, zero=zero) for zero in (2, 3)),
    Row(data=2, pipeline=2, zero=2),
    Row(pipeline=2, tensor=2),
    Row(data=2, tensor=2, expert=2),
]


PRODUCT = [(optimizer, row) for row in ROWS for optimizer in OPTIMIZERS]
TABLE = PRODUCT[::5]  # by turns: each optimizer in a fifth of the layouts, each layout with a fifth of the optimizers


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("table", [TABLE, pytest.param(PRODUCT, marks=pytest.mark.full)], ids=["table", "product"])
def test_every_layout_gives_the_numbers_of_one_process(size, table):
    tasks = [(optimizer, row) for optimizer, row in table if row.size == size]
    expected = dict(zip(OPTIMIZERS, train_all([(name, Row()) for name in OPTIMIZERS]), strict=True))
    outcomes = run_trainers(size, train_all, tasks, timeout=300)[0]
    for (optimizer, row), found in zip(tasks, outcomes, strict=True):
        about = f"{optimizer} {row}"
        assert_close(found, expected[optimizer], rtol=1e-9, atol=1e-12, msg=lambda text, at=about: f"{at}: {text}")


def test_a_second_run_makes_its_optimizer_over_what_is_left():
    tasks = [("lamb", Row(tensor=2)), ("adafactor", Row(data=2, expert=2, zero=3)), ("sm3", Row(pipeline=2))]
    outcomes = run_trainers(2, train_all_twice, tasks, timeout=300)[0]
    expected = train_all_twice([(optimizer, Row()) for optimizer, _ in tasks])
    assert_close(outcomes, expected, rtol=1e-9, atol=1e-12)


SAVED = {  # name -> where it is saved, and in which form
    "zero": (Row(data=2, zero=3), "sharded"),
    "host": (Row(data=2, zero=2, cpu_offload=True), "full"),
    "tensor": (Row(data=2, tensor=2, zero=1), "sharded"),
    "slices": (Row(tensor=2, pipeline=2), "full"),
    "experts": (Row(data=4, expert=2, zero=2), "sharded"),
    "one": (Row(), "full"),
}
RESUMED = {  # saved -> where it goes on
    "zero": Row(data=2, tensor=2, zero=1),
    "host": Row(data=4, expert=2, zero=2),
    "tensor": Row(data=2, zero=3),
    "slices": Row(),
    "experts": Row(tensor=2),
    "one": Row(data=4, zero=3),
}
KEEPING = [name for name in OPTIMIZERS if name in ("lamb", "adafactor", "sm3")]


def test_states_go_on_in_any_other_layout(tmp_path):
    expected = dict(zip(KEEPING, train_all([(name, Row()) for name in KEEPING]), strict=True))
    for size in (1, 2, 4):
        tasks = [
            (f"{name}-{optimizer}", optimizer, row, form)
            for name, (row, form) in SAVED.items()
            for optimizer in KEEPING
            if row.size == size
        ]
        run_trainers(size, save_all, tmp_path, tasks, timeout=300)
    for size in (1, 2, 4):
        tasks = [(f"{n}-{o}", o, row) for n, row in RESUMED.items() for o in KEEPING if row.size == size]
        outcomes = run_trainers(size, go_on, tmp_path, tasks, timeout=300)[0]
        for (name, optimizer, row), found in zip(tasks, outcomes, strict=True):
            about = f"{name} in {row}"
            assert_close(found, expected[optimizer], rtol=1e-9, atol=1e-12, msg=lambda text, at=about: f"{at}: {text}")
