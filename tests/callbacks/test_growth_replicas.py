"""When a run leaves for more replicas, and which runs cannot."""

import os

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from lightning_hybrid import latest_checkpoint
from lightning_hybrid.callbacks import BatchSizeGrowth
from lightning_hybrid.parallel.elastic import EXIT_FOR_MORE_REPLICAS, LeaveForMoreReplicas, Meeting
from tests.callbacks.test_batch_size_growth import Net
from tests.launch import run_trainers
from tests.small import fit, hybrid, loader, samples, trainer_of


def growth(folder, **options):
    return BatchSizeGrowth(**{"milestones": [1], "max_accumulate": 1, "max_replicas": 2, "dirpath": folder, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_replicas": 1}, "max_replicas=1 must be a whole number of at least 2"),
        ({"dirpath": None}, "max_replicas=2 needs dirpath"),
        ({"max_accumulate": None}, "max_accumulate=None, max_microbatches=None, max_replicas=2"),
    ],
)
def test_wrong_arguments_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        growth(tmp_path, **options)


def test_a_run_that_nobody_would_start_again_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(ValueError, match=r"nobody would\. Start it by lightning-hybrid elastic --dirpath"):
        fit(Net(), loader(8, 4), callbacks=[growth(tmp_path)])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    with pytest.raises(ValueError, match="--max-restarts=0 and would not start the run again"):
        fit(Net(), loader(8, 4), callbacks=[growth(tmp_path)])


def agent(monkeypatch, **numbers):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    for name, number in {"MAX_RESTARTS": 3, "RESTART_COUNT": 0, **numbers}.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", str(number))
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK"):
        monkeypatch.setenv(name, "0")


def test_loaders_with_a_state_of_one_replica_are_refused(tmp_path, monkeypatch):
    agent(monkeypatch)
    with pytest.raises(ValueError, match="Stateful keeps its own state"):
        fit(Net(), Stateful(samples(8), 4), callbacks=[growth(tmp_path)])


def own_folder(folder):
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "3"
    folder = folder / os.environ["RANK"]
    folder.mkdir()
    with pytest.raises(
        ValueError, match=r"not all ranks see what rank 0 writes there\. Give a folder that all nodes share"
    ):
        fit(Net(), loader(8, 4), hybrid(1), devices=2, callbacks=[growth(folder)])
    return os.listdir(folder)


def test_a_folder_that_the_nodes_do_not_share_is_refused(tmp_path, monkeypatch):
    assert run_trainers(2, own_folder, tmp_path) == [[], []]
    agent(monkeypatch)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"rank 0 cannot write to it: .*Give a folder that all nodes share"):
        fit(Net(), loader(8, 4), callbacks=[growth(tmp_path / "file" / "run")])


class Stateful(DataLoader):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise AssertionError


class Validated(Net):
    def validation_step(self, batch, batch_idx):
        return self.loss(batch)


@pytest.mark.parametrize(("model", "validation"), [(Net, []), (Validated, [loader(4, 4)])])
def test_a_stock_strategy_leaves_between_epochs_and_goes_on(model, validation, tmp_path, monkeypatch):
    agent(monkeypatch)
    Meeting(tmp_path).wait_outside("late")
    with pytest.raises(LeaveForMoreReplicas) as left:
        trainer_of(callbacks=[growth(tmp_path)], max_epochs=2).fit(model(), loader(8, 4), *validation)
    assert left.value.code == EXIT_FOR_MORE_REPLICAS
    state = Meeting(tmp_path).read()
    assert (state.state, state.invited, state.replicas, state.wanted) == ("leaving", ("late",), 1, 2)
    callback = growth(tmp_path)
    trainer = trainer_of(callbacks=[callback], max_epochs=2)
    trainer.fit(model(), loader(8, 4), *validation, ckpt_path=latest_checkpoint(tmp_path))
    logged = trainer.fit_loop.epoch_loop._batches_that_stepped
    assert (trainer.global_step, logged, callback.global_batch) == (3, 3, 8)
    assert Meeting(tmp_path).waiting() == []
    assert Meeting(tmp_path).read().state == "ended"


def test_a_run_stays_where_it_could_not_go_on(tmp_path, monkeypatch):
    Meeting(tmp_path).wait_outside("late")
    agent(monkeypatch)
    growing = growth(tmp_path, interval="step", milestones=[2])
    assert fit(Net(), loader(24, 4), callbacks=[growing]).global_step == 2 + 2  # stock, in the middle of an epoch
    agent(monkeypatch, RESTART_COUNT=3)
    with pytest.warns(UserWarning, match="nodes wait, and an agent of torchrun has no restarts left"):
        trainer = fit(Net(), loader(8, 4), callbacks=[growth(tmp_path)], max_epochs=2)
    assert trainer.global_step == 3


def test_after_sigterm_agents_start_the_run_again(tmp_path, monkeypatch):
    agent(monkeypatch)
    with pytest.raises(SIGTERMException) as left:
        fit(Net(), loader(8, 4), callbacks=[growth(tmp_path), Terminated()])
    assert left.value.code == EXIT_FOR_MORE_REPLICAS


class Terminated(Callback):
    def on_train_batch_end(self, *args):
        raise SIGTERMException
