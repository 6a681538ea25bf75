"""Losses and weights of three steps over many processes equal those of one process."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

import pytest
from torch.testing import assert_close

from tests.launch import run_trainers
from tests.pairs import all_pairs, all_rows, pairs_of
from tests.parity_models import MODELS
from tests.parity_run import CASES, Layout, Outcome, Row, by_step, fit_rows, reference

LAYOUTS = [
    Layout(pipeline=1, data=1, chunks=1),
    Layout(pipeline=1, data=2, chunks=1),
    Layout(pipeline=2, data=1, chunks=1),
    Layout(pipeline=2, data=1, chunks=2),
    Layout(pipeline=2, data=2, chunks=1),
    Layout(pipeline=4, data=1, chunks=1),
    Layout(pipeline=2, data=2, chunks=2),
    Layout(pipeline=1, data=4, chunks=1),
    Layout(pipeline=1, data=4, chunks=1, replicate=2),
    Layout(pipeline=1, data=1, chunks=1, tensor=2),
    Layout(pipeline=1, data=1, chunks=1, tensor=4),
    Layout(pipeline=2, data=1, chunks=1, tensor=2),
    Layout(pipeline=1, data=2, chunks=1, tensor=2),
    Layout(pipeline=2, data=1, chunks=2, tensor=2),
]
WIDE = Layout(pipeline=2, data=2, chunks=1, tensor=2)  # in the full product alone
SCHEDULES = ["1f1b", "interleaved_1f1b", "gpipe"]
MULTI_HEAD = ("attention", "fused")  # written for the tensor axis: without it they are like the others
NO_SEQUENCE = ("mlp", "skips", "in-place")  # features of a sample, no sequence
COLUMNS = [list(MODELS), LAYOUTS, SCHEDULES, [0, 1, 2, 3], list(CASES), [False, True, "regather"]]
ROWS_PER_LAUNCH = 16


def can_run(model: str, layout: Layout, schedule: str, zero_stage: int, case: str, sequence: bool | str) -> bool:
    if (zero_stage == 0 and layout.replicate > 1) or (zero_stage > 1 and layout.data == 1):
        return False  # nothing is sharded
    if layout.tensor == 1:
        return model not in MULTI_HEAD and not sequence and (schedule != "1f1b" or layout.chunks == 1)
    if schedule != ("1f1b" if layout.chunks == 1 else "interleaved_1f1b"):
        return False  # what is within a stage does not depend on it
    return model != "mlp" and not (sequence and model in NO_SEQUENCE)


def wide_rows() -> list[Row]:
    found = all_rows([list(MODELS), [WIDE], ["1f1b"], [0, 1, 2, 3], ["weighted-window"], [False, True]], can_run)
    return [Row(*values) for values in found]


PRODUCT = [*(Row(*values) for values in all_rows(COLUMNS, can_run)), *wide_rows()]
TABLE = [Row(*values) for values in all_pairs(COLUMNS, can_run)]
MARKS = dict.fromkeys(set(PRODUCT) - set(TABLE), pytest.mark.full)
PARAMETERS = [pytest.param(row, id=str(row), marks=MARKS.get(row, ())) for row in PRODUCT]


class Launches:
    """Runs rows of one world size in the same processes, one after the other; where one of them fails, each alone."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._waiting = list(_groups(rows))
        self._done: dict[Row, list[Outcome]] = {}

    def outcomes(self, row: Row) -> list[Outcome]:
        """What each rank saw."""
        for group in [group for group in self._waiting if row in group]:
            self._waiting.remove(group)
            with suppress(RuntimeError, TimeoutError):
                self._done.update(_launch(group))
        return self._done.pop(row) if row in self._done else _launch([row])[row]


def _groups(rows: Sequence[Row]) -> Iterator[list[Row]]:
    for size in sorted({row.layout.world_size for row in rows}):
        equal = [row for row in rows if row.layout.world_size == size]
        yield from (equal[i : i + ROWS_PER_LAUNCH] for i in range(0, len(equal), ROWS_PER_LAUNCH))


def _launch(rows: list[Row]) -> dict[Row, list[Outcome]]:
    ranks = run_trainers(rows[0].layout.world_size, fit_rows, rows, timeout=60 + 10 * len(rows))
    return dict(zip(rows, map(list, zip(*ranks, strict=True)), strict=True))


@pytest.fixture(scope="module")
def launches(request: pytest.FixtureRequest) -> Launches:
    """Of the rows that this run of pytest selected."""
    items = [item for item in request.session.items if "launches" in getattr(item, "fixturenames", ())]
    return Launches(sorted((item.callspec.params["row"] for item in items), key=PRODUCT.index))


@pytest.mark.filterwarnings("ignore:You defined a .validation_step.")
@pytest.mark.parametrize("row", PARAMETERS)
def test_any_layout_gives_the_numbers_of_one_process(row, launches):
    same = partial(assert_close, rtol=1e-9, atol=1e-12)
    expected, ranks = reference(row.model, row.case), launches.outcomes(row)
    first = by_step(ranks[0], row)
    same(first.losses, expected.losses)
    same(first.epoch, expected.epoch)
    same(first.weights, expected.weights)
    assert list(first.weights) == list(expected.weights)
    for other in ranks[1:]:
        assert_close((other.losses, other.epoch), (ranks[0].losses, ranks[0].epoch), rtol=0, atol=0)


def test_default_table_has_every_pair_and_is_small():
    small = [row for row in PRODUCT if row.layout != WIDE]
    assert set().union(*map(pairs_of, TABLE)) == set().union(*map(pairs_of, small))
    assert len(TABLE) < len(PRODUCT) / 30
