"""Whatever happens to one rank, all of them end soon, say why, and leave no checkpoint that is not whole."""

import random

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from tests.jobs import MESSAGE, check_clean_end, fail, run_job, stop, strike
from tests.small import Small, fit, loader, weights
from tests.test_launchers import free_port, is_gone, output_of, start

MOMENTS = ["start", "forward", "backward", "save", "write", "epoch end"]
SHORT = [
    (0, "write", "kill"),
    (1, "forward", "raise"),
    (0, "backward", "kill"),
    (1, "epoch end", "raise hang"),
    (0, "epoch end", "kill hang"),
    (3, "forward", "raise"),
    (1, "start", "kill"),
    (1, "save", "raise"),
]


def draws(size, number=20):
    """Where, when and how a job is struck; "write" is rank 0's, since it alone writes."""
    draw = random.Random(5)
    faults = [(draw.randrange(size), draw.choice(MOMENTS), draw.choice(["kill", "raise"])) for _ in range(number)]
    return [(0 if moment == "write" else rank, moment, way) for rank, moment, way in faults]


@pytest.mark.parametrize(("rank", "moment", "way"), SHORT)
def test_all_ranks_end_when_one_is_struck(rank, moment, way, tmp_path):
    size = 4 if rank > 1 else 2
    check_clean_end(run_job(size, strike, tmp_path, rank, moment, way), tmp_path, rank, way)


@pytest.mark.parametrize(
    ("pipeline", "rank", "moment", "way"),
    [(1, 1, "backward", "kill"), (1, 0, "forward", "raise"), (1, 1, "save", "kill"), (2, 3, "forward", "kill")],
)
def test_all_ranks_of_a_tensor_axis_end_when_one_is_struck(pipeline, rank, moment, way, tmp_path):
    ended = run_job(2 * pipeline, strike, tmp_path, rank, moment, way, pipeline, 2)
    check_clean_end(ended, tmp_path, rank, way)


@pytest.mark.full
@pytest.mark.parametrize(
    ("starter", "rank", "moment", "way"),
    [
        ("lightning", 0, "early", "raise"),
        ("lightning", 1, "early", "raise"),
        ("lightning", 0, "forward", "kill"),
        ("lightning", 1, "forward", "kill"),
        ("lightning", 0, "epoch end", "raise hang"),
        ("torchrun", 1, "epoch end", "kill hang"),
        ("torchrun", 0, "backward", "raise"),
    ],
)
def test_no_process_is_left_when_a_launcher_starts_them(starter, rank, moment, way, tmp_path):
    script = ["-m", "tests.struck", tmp_path, rank, moment, way]
    if starter == "torchrun":
        script = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}", *script]
    process = start(*script)
    output = output_of(process)
    assert process.returncode != 0
    assert f"ArithmeticError: {MESSAGE}" in output or f"ank {rank} failed first: its process (" in output, output
    assert is_gone(process.pid), output


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_end_whenever_one_is_struck(size, tmp_path):
    for number, (rank, moment, way) in enumerate(draws(size)):
        folder = tmp_path / str(number)
        folder.mkdir()
        check_clean_end(run_job(size, strike, folder, rank, moment, way), folder, rank, way)


def test_sigterm_to_a_single_process_saves_too(tmp_path):
    ended = run_job(1, stop, tmp_path, (0,), "training", [ModelCheckpoint(tmp_path, monitor="val")], 1)
    assert ended.codes == [0], str(ended)
    assert torch.load(tmp_path / "sigterm.ckpt", weights_only=True)["global_step"] == 3


def test_sigterm_to_any_rank_makes_all_leave_after_the_same_batch_with_a_checkpoint(tmp_path):
    """The checkpoint is that of one process after as many steps."""
    signals = [
        ((0,), "training", 3, 2),
        ((3,), "training", 3, 2),
        ((0, 1), "validation", 2, 2),
        ((1,), "validation", 2, 1),
    ]
    for ranks, hook, step, pipeline in signals:
        folder = tmp_path / f"{hook}-{ranks}-{pipeline}"
        folder.mkdir()
        size = 4 if 3 in ranks else 2
        ended = run_job(size, stop, folder, ranks, hook, [ModelCheckpoint(folder, monitor="val")], pipeline)
        assert ended.codes == [0] * size, str(ended)
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


def saving(folder):
    return [OnExceptionCheckpoint(folder, "mine"), ModelCheckpoint(folder, "model-{step}", save_on_exception=True)]


def test_error_of_one_rank_is_not_saved_and_the_warning_names_it(tmp_path):
    ended = run_job(2, fail, tmp_path, (1,), saving(tmp_path))
    check_clean_end(ended, tmp_path, 1, "raise")
    warning = f"No checkpoint is saved on this exception: rank 1 failed first: ArithmeticError: {MESSAGE}"
    assert all(warning in log for log in ended.logs), str(ended)
    assert not list(tmp_path.glob("*.ckpt"))


def test_error_of_all_ranks_after_the_same_batch_is_saved(tmp_path):
    ended = run_job(2, fail, tmp_path, (0, 1), saving(tmp_path))
    assert ended.codes == [1, 1], str(ended)
    assert all("No checkpoint is saved" not in log for log in ended.logs), str(ended)
    assert all(f"ArithmeticError: {MESSAGE}" in log for log in ended.logs), str(ended)
    for name in ("mine.ckpt", "model-step=3.ckpt"):
        assert torch.load(tmp_path / name, weights_only=True)["global_step"] == 3


def test_error_inside_a_step_is_not_saved_even_if_all_ranks_raise_it(tmp_path):
    ended = run_job(2, fail, tmp_path, (0, 1), saving(tmp_path), True)
    assert None not in ended.codes
    assert 0 not in ended.codes
    assert any("it was raised inside a step (rank" in log for log in ended.logs), str(ended)
    assert not list(tmp_path.glob("*.ckpt"))


def test_interrupt_of_one_rank_ends_all(tmp_path):
    ended = run_job(2, fail, tmp_path, (1,), [], False, KeyboardInterrupt)
    assert ended.codes == [1, 1], str(ended)
    assert "ank 1 failed first: KeyboardInterrupt" in ended.logs[0], str(ended)


def test_signal_after_the_last_batch_is_a_warning(tmp_path):
    ended = run_job(2, stop, tmp_path, (0,), "end", [])
    assert ended.codes == [0, 0], str(ended)
    assert "SIGTERM came after the last batch" in ended.logs[0]
    assert "SIGTERM" not in ended.logs[1]
