"""The file of a run's collapses, and their list in an error."""

import csv
from datetime import datetime, timedelta
from types import SimpleNamespace

from lightning_hybrid.callbacks.rollback_audit import COLUMNS, SHOWN, RollbackAudit

ROW = {"retry": 1, "epoch": 0, "step": 5, "batches": "6", "reason": "loss is nan", "action": "go on"}


def test_a_resumed_run_adds_to_the_file_and_rank_0_alone_writes(tmp_path):
    path = tmp_path / "new" / "audit.csv"
    for step in (5, 9):
        for writes in (True, False):
            audit = RollbackAudit(str(path))
            audit.add(SimpleNamespace(is_global_zero=writes), **ROW | {"step": step, "module": None})
            assert [row["step"] for row in audit.rows] == [step]
    with open(path) as file:
        rows = list(csv.DictReader(file))
    assert [(tuple(row), row["step"], row["module"]) for row in rows] == [(COLUMNS, "5", ""), (COLUMNS, "9", "")]
    assert datetime.fromisoformat(rows[0]["time"]).utcoffset() == timedelta(0)


def test_an_error_tells_the_last_rows(tmp_path):
    audit = RollbackAudit(str(tmp_path / "audit.csv"))
    for step in range(SHOWN + 2):
        culprit = {SHOWN - 1: {"module": "gradient of inlet.bias"}, SHOWN: {"module": "blocks.3", "rank": 0}}.get(
            step, {}
        )
        audit.add(SimpleNamespace(is_global_zero=True), **ROW | {"step": step} | culprit)
    lines = audit.used_up(4, 3, 100).splitlines()
    assert "diverged 4 times, each less than 100 steps after the one before, and max_retries=3" in lines[0]
    assert str(tmp_path) in lines[0]
    assert lines[1] == "  2 before"
    assert lines[2] == "  step 2, batches 6 of epoch 0: loss is nan (go on)"
    assert lines[-2] == "  step 5, batches 6 of epoch 0: loss is nan, first in blocks.3 on rank 0 (go on)"
    assert lines[-3] == "  step 4, batches 6 of epoch 0: loss is nan, first in gradient of inlet.bias (go on)"
    assert len(lines) == SHOWN + 2
