"""Whatever happens to one rank, all of them end soon, say why, and leave no checkpoint that is not whole."""

import random

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from tests.jobs import check_clean_end, run_job, stop, strike
from tests.small import Small, fit, loader, weights

MOMENTS = ["start", "forward", "backward", "save", "write", "epoch end"]
SHORT = [
    (0, "write", "kill"),
    (1, "forward", "raise"),
    (0, "backward", "kill"),
    (1, "epoch end", "raise hang"),
    (0, "epoch end", "kill hang"),
]


def draws(number=20, size=2):
    """Where, when and how a job is struck; "write" is rank 0's, since it alone writes."""
    draw = random.Random(5)
    faults = [(draw.randrange(size), draw.choice(MOMENTS), draw.choice(["kill", "raise"])) for _ in range(number)]
    return [(0 if moment == "write" else rank, moment, way) for rank, moment, way in faults]


@pytest.mark.parametrize(("rank", "moment", "way"), SHORT)
def test_all_ranks_end_when_one_is_struck(rank, moment, way, tmp_path):
    check_clean_end(run_job(2, strike, tmp_path, rank, moment, way), tmp_path, rank, way)


@pytest.mark.full
def test_all_ranks_end_whenever_one_is_struck(tmp_path):
    for number, (rank, moment, way) in enumerate(draws()):
        folder = tmp_path / str(number)
        folder.mkdir()
        check_clean_end(run_job(2, strike, folder, rank, moment, way), folder, rank, way)


def test_sigterm_to_any_rank_makes_all_leave_after_the_same_batch_with_a_checkpoint(tmp_path):
    """The checkpoint is that of one process after as many steps."""
    for ranks, hook, step in [((0,), "training", 3), ((1,), "training", 3), ((0, 1), "validation", 2)]:
        folder = tmp_path / f"{hook}-{ranks}"
        folder.mkdir()
        ended = run_job(2, stop, folder, ranks, hook, [ModelCheckpoint(folder, monitor="val")])
        assert ended.codes == [0, 0], str(ended)
        assert all(log.count(f"left by SIGTERMException at step {step}") == 1 for log in ended.logs), str(ended)
        assert "sigterm.ckpt at step" in ended.logs[0]
        saved = torch.load(folder / "sigterm.ckpt", weights_only=True)
        one_process = fit(Small(), loader(16, 4), max_steps=step)
        assert saved["global_step"] == step
        torch.testing.assert_close(saved["state_dict"], dict(weights(one_process)))
        momenta = one_process.optimizers[0].state_dict()["state"]
        torch.testing.assert_close(saved["optimizer_states"][0]["state"], momenta)


@pytest.mark.parametrize("kind", ["own", "model"])
def test_callback_for_exceptions_saves_on_sigterm(kind, tmp_path):
    callback = OnExceptionCheckpoint(tmp_path, "mine") if kind == "own" else ModelCheckpoint(save_on_exception=True)
    ended = run_job(2, stop, tmp_path, (1,), "training", [callback])
    assert ended.codes == [0, 0], str(ended)
    files = {file.name: file for file in tmp_path.glob("**/*.ckpt")}
    assert "sigterm.ckpt" not in files
    saved = files["mine.ckpt" if kind == "own" else "epoch=0-step=3.ckpt"]
    assert torch.load(saved, weights_only=True)["global_step"] == 3
