"""Runs that end early while they write folders: what is saved is whole, and what cannot be whole is not there."""

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.testing import assert_close

from lightning_hybrid.parallel.checkpoint.reading import FolderReader
from tests.jobs import MESSAGE, fail, run_job, stop
from tests.saving_jobs import verify
from tests.small import Small, fit, loader, weights
from tests.test_failures import saving

FOLDER = {"state_dict_type": "sharded"}
ASYNC = {**FOLDER, "async_save": True}


def left(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("log-"))


@pytest.mark.parametrize(("options", "pipeline"), [(FOLDER, 2), (ASYNC, 1)], ids=["waits", "async"])
def test_sigterm_leaves_a_whole_folder(options, pipeline, tmp_path):
    """Case 27; with a save in the background that is not done, or just done, when the signal comes."""
    callback = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    ended = run_job(2, stop, tmp_path, (1,), "training", [callback], pipeline, options)
    assert ended.codes == [0, 0], str(ended)
    assert left(tmp_path) == ["sigterm.ckpt", "step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]
    assert [verify(tmp_path / name) for name in left(tmp_path)] == [3, 1, 2, 3]
    one, reader = fit(Small(), loader(16, 4), max_steps=3), FolderReader(tmp_path / "sigterm.ckpt")
    for key, value in weights(one).items():
        assert_close(reader.whole("model." + key), value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("options", "error"), [(FOLDER, ArithmeticError), (ASYNC, KeyboardInterrupt)])
def test_error_of_one_rank_leaves_nothing_half_written(options, error, tmp_path):
    """Case 26."""
    ended = run_job(2, fail, tmp_path, (1,), saving(tmp_path), False, error, options)
    assert None not in ended.codes, str(ended)
    assert 0 not in ended.codes, str(ended)
    assert f"ank 1 failed first: {error.__name__}" in ended.logs[0], str(ended)
    assert left(tmp_path) == []


@pytest.mark.parametrize("options", [FOLDER, ASYNC], ids=["waits", "async"])
def test_error_of_all_ranks_leaves_a_whole_folder(options, tmp_path):
    callbacks = [OnExceptionCheckpoint(tmp_path, "mine"), ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2)]
    ended = run_job(2, fail, tmp_path, (0, 1), callbacks, False, ArithmeticError, options)
    assert ended.codes == [1, 1], str(ended)
    assert all(f"ArithmeticError: {MESSAGE}" in log for log in ended.logs), str(ended)
    assert left(tmp_path) == ["mine.ckpt", "step=2.ckpt"]
    assert [verify(tmp_path / name) for name in left(tmp_path)] == [3, 2]
