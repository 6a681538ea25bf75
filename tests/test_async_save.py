"""`async_save=True`: what is written is the state at the moment of the save, and no error is lost."""

import threading
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from lightning_hybrid.parallel.checkpoint.hollow import Hollow
from lightning_hybrid.parallel.checkpoint.planner import PartsSavePlanner
from lightning_hybrid.parallel.checkpoint.reading import FolderReader
from lightning_hybrid.strategies import checkpoints
from tests.launch import run_trainers
from tests.saving_jobs import run, verify


class Ahead(Callback):
    """Lets a save begin to write only when training is a step ahead of it, or over."""

    def __init__(self):
        self.moved, self.running, self.most, self.seen = threading.Event(), 0, 0, []

    @contextmanager
    def installed(self):
        plain, save = PartsSavePlanner.create_local_plan, checkpoints.save_sharded

        def plan(planner):
            assert self.moved.wait(60)
            return plain(planner)

        def counted(*args):
            self.running += 1
            self.most = max(self.most, self.running)
            save(*args)
            self.running -= 1

        with (
            patch.object(PartsSavePlanner, "create_local_plan", plan),
            patch.object(checkpoints, "save_sharded", counted),
        ):
            yield

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append((trainer.global_step, self.running))
        if self.seen[-1][0] % 2:
            self.moved.set()

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.moved.set()  # of the one before, which this one waits for

    def on_train_end(self, trainer, pl_module):
        self.moved.set()


class Changing(Callback):
    """Gives what it goes on changing as its state."""

    def __init__(self):
        self.state = {"batches": [], "sum": torch.zeros(1)}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.state["batches"].append(batch_idx)
        self.state["sum"] += 1

    def state_dict(self):
        return self.state


def same_as_waiting(folder, pipeline):
    """Folders of a run that waits for its saves and of one that does not, and how far the latter was ahead."""
    run(folder / "waits", pipeline=pipeline, steps=5, callbacks=[Changing()])
    ahead = Ahead()
    with ahead.installed():
        trainer = run(folder / "ahead", pipeline=pipeline, steps=5, callbacks=[ahead, Changing()], async_save=True)
    found = sorted(path.name for path in (folder / "ahead").iterdir())  # at once: the end of training waits
    trainer.save_checkpoint(folder / "ahead" / "end.ckpt")
    assert verify(folder / "ahead" / "end.ckpt") == 5
    return found, ahead.most, ahead.seen


def failing(folder, rank, steps):
    """Errors of a run in which a rank cannot write, and how far it got."""
    plain, calls = PartsSavePlanner.resolve_data, []

    def full(planner, item):
        calls.append(item)
        raise OSError(28, "No space left on device")

    function = full if dist.get_rank() == rank else plain
    with (
        patch.object(PartsSavePlanner, "resolve_data", function),
        pytest.raises(OSError, match="was not saved") as caught,
    ):
        run(folder, steps=steps, async_save=True)
    trainer = run(folder / "again", steps=2, async_save=True)  # nothing is left of the error
    assert calls or dist.get_rank() != rank
    return str(caught.value), trainer.global_step, sorted(path.name for path in folder.iterdir())


class Requeued(Callback):
    """Saves under the name that Lightning gives before it asks SLURM for a requeue, which ends the job."""

    def __init__(self, folder):
        self.path, self.at = folder / "hpc_ckpt_1.ckpt", None

    def on_fit_end(self, trainer, pl_module):
        """Training does not go on, and nothing waits later."""
        trainer.save_checkpoint(self.path.with_name("end.ckpt"))
        self.end = verify(self.path.with_name("end.ckpt"))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.at is None:
            trainer.save_checkpoint(self.path)
            self.at = verify(self.path)


def requeued(folder):
    requeue = Requeued(folder)
    run(folder, steps=2, callbacks=[requeue], async_save=True)
    return requeue.at, requeue.end


def full_files(folder):
    """What is said on each rank where rank 0 cannot write its file, and the names that are left."""

    def full(*args):
        raise OSError(28, "No space left on device")

    with patch.object(Hollow, "fill", full), pytest.raises(OSError, match="No space left") as caught:
        run(folder, steps=8, async_save=True, state_dict_type="full")
    return str(caught.value), sorted(path.name for path in folder.iterdir())


def on_ranks(folder):
    return {
        "pipeline": same_as_waiting(folder / "pipeline", 2),
        "replicas": same_as_waiting(folder / "replicas", 1),
        "next step": failing(folder / "next", 1, 8),
        "no step": failing(folder / "none", 0, 2),
        "requeue": requeued(folder / "requeue"),
        "files": full_files(folder / "full"),
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("async")
    return folder, run_trainers(2, on_ranks, folder, timeout=240)


@pytest.mark.parametrize("name", ["pipeline", "replicas"])
def test_the_state_is_that_of_the_moment_though_training_goes_on(outcomes, name):
    folder, ranks = outcomes
    for found, most, seen in (rank[name] for rank in ranks):
        assert found == ["last.ckpt", "step=2.ckpt", "step=4.ckpt"]
        assert most == 1
        assert any(running for step, running in seen if step in (2, 4))
    for path in (folder / name / "waits").iterdir():
        one, other = FolderReader(path), FolderReader(folder / name / "ahead" / path.name)
        assert set(one.names) == set(other.names)
        assert all(torch.equal(one.whole(tensor), other.whole(tensor)) for tensor in one.names)
        assert other.manifest.global_step == one.manifest.global_step
        loops = [reader.training()["loops"] for reader in (one, other)]
        assert loops[0] == loops[1]
        states = [reader.training()["callbacks"]["Changing"] for reader in (one, other)]
        assert states[0] == states[1]
        assert len(states[0]["batches"]) == states[0]["sum"] == one.manifest.global_step


@pytest.mark.parametrize(("name", "rank"), [("next step", 1), ("no step", 0)])
def test_no_error_is_lost(outcomes, name, rank):
    _, ranks = outcomes
    for message, step, names in (of_rank[name] for of_rank in ranks):
        assert f"rank {rank}: OSError: [Errno 28] No space left on device" in message
        assert "was there before still is" in message
        assert step == 2
        assert names == ["again"]


def test_no_error_of_a_file_is_lost(outcomes):
    _, ranks = outcomes
    for message, names in (of_rank["files"] for of_rank in ranks):
        assert "No space left on device" in message
        assert names == []


def test_a_save_is_complete_before_slurm_is_asked_for_a_requeue(outcomes):
    assert [of_rank["requeue"] for of_rank in outcomes[1]] == [(1, 2), (1, 2)]
