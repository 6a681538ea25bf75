"""What is left out, and what else goes on meanwhile: validations, growing windows, schedules, several evaluations."""

import csv
import os

import pytest
import torch
from lightning.pytorch import Callback

from lightning_hybrid.callbacks import BatchSizeGrowth, DivergenceRollback
from tests.callbacks.test_divergence_rollback import Scheduled, compared, data, run
from tests.small import Small, trainer_of, weights


def rollback(*args, **options):
    return DivergenceRollback(*args, **{"audit": os.devnull, **options})


class Validated(Scheduled):
    """Counts its validations."""

    validations = 0

    def validation_step(self, batch, batch_idx):
        return self.loss(batch)

    def on_validation_epoch_end(self):
        self.validations += 1


class Counts(Callback):
    """Counts validations and batches in its state, and where the validations have been."""

    def __init__(self):
        self.validations, self.batches, self.places = 0, 0, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches += 1

    def on_validation_end(self, trainer, pl_module):
        self.validations += 1
        self.places.append((trainer.fit_loop.epoch_loop.batch_progress.current.ready, trainer.global_step))

    def state_dict(self):
        return {"validations": self.validations}

    def load_state_dict(self, state):
        self.validations = state["validations"]


def fitted(model, loader, *callbacks, resume=None, **options):
    torch.manual_seed(1)
    trainer = trainer_of(callbacks=list(callbacks), num_sanity_val_steps=0, **options)
    trainer.fit(model(), loader, data(1), ckpt_path=resume)
    return trainer


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.filterwarnings("ignore:You requested to overfit", "ignore:.*was configured so validation will run")
def test_a_validation_within_a_bad_window_has_been(every):
    """Batches 4 to 7 are one step, and what comes before a validation in it is not left out."""
    counts = Counts()
    options = {"accumulate_grad_batches": 4, "val_check_interval": every}
    trainer = fitted(Validated, data(poisoned=[7]), rollback(skip_batches=8), counts, **options)
    assert (counts.validations, trainer.lightning_module.validations) == (12 // every, 12 // every)
    compared(weights(trainer), weights(run(Scheduled, data(without=range(4, 8)), accumulate_grad_batches=4)))


class Fills(Callback):
    """Saves nothing before its first batch."""

    def __init__(self, takes_empty):
        self.state, self.takes_empty = {}, takes_empty

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.state["batches"] = self.state.get("batches", 0) + 1

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state):
        assert state or self.takes_empty, "nothing there"
        self.state = dict(state)


def test_callbacks_go_back_to_an_empty_state():
    fills = Fills(takes_empty=True)
    run(Scheduled, data(poisoned=[3]), fills, rollback())
    assert fills.state == {"batches": 11}
    with pytest.raises(RuntimeError, match=r"Fills.state_dict\(\) was empty .*nothing there.* goes_back = False"):
        run(Scheduled, data(poisoned=[3]), Fills(takes_empty=False), rollback())


class Steps(Callback):
    """Batches of each step that was taken, those taken again included."""

    def __init__(self):
        self.taken, self.now = [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.now.append(batch_idx)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.taken.append(self.now)
        self.now = []


@pytest.mark.parametrize(
    ("skip", "bad", "first", "stop"), [(None, 7, 6, 10), (4, 7, 4, 10), (6, 10, 6, 12), (7, 10, 4, 12), (7, 7, 2, 9)]
)
def test_windows_of_a_growing_batch_are_left_out_whole(skip, bad, first, stop, tmp_path):
    """Of 1, 1, 2, 2, 3, 3 batches and so on; after the run has gone back, those of 3 come later."""
    steps, path = Steps(), tmp_path / "audit.csv"
    growth = [BatchSizeGrowth([1, 3], max_batch=12, interval="step") for _ in range(2)]
    callback = DivergenceRollback(skip_batches=skip, audit=str(path))
    trainer = run(Scheduled, data(18, poisoned=[bad]), growth[0], steps, callback)
    again = steps.taken[next(i for i, step in enumerate(steps.taken) if i and step == [0]) :]
    assert [number for step in again for number in step] == [*range(first), *range(stop, 18)]
    with open(path) as file:
        assert [row["batches"] for row in csv.DictReader(file)] == [f"{first}-{stop - 1}"]
    if (stop - first) % 6 == 0:  # else the clean run grows at another batch
        clean = run(Scheduled, data(18, without=range(first, stop)), growth[1])
        compared(weights(trainer), weights(clean))


def test_a_run_that_collapses_on_the_way_forward_leaves_out_all_from_there(tmp_path):
    judged = []

    def detector(loss, norm):
        judged.append(loss)
        return len(judged) in (6, 9)  # batch 5, and batch 2 when it comes again

    trainer = run(Scheduled, data(), DivergenceRollback(detector, audit=str(tmp_path / "audit.csv")))
    with open(tmp_path / "audit.csv") as file:
        assert [row["batches"] for row in csv.DictReader(file)] == ["5", "2-5"]
    compared(weights(trainer), weights(run(Scheduled, data(without=range(2, 6)))))


class Places:
    """A loader that knows its place."""

    batch_size = 4

    def __init__(self, loader):
        self.loader, self.place = loader, 0

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        for number, batch in enumerate(self.loader):
            if number >= self.place:
                self.place = number + 1
                yield batch

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Breaks(Callback):
    """Labels of batch 5 are NaN wherever the data begins; a checkpoint is saved when step 3 is taken again."""

    def __init__(self, path, times):
        self.path, self.times = path, times

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 5:
            batch[1].fill_(torch.nan)

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.times -= trainer.global_step == 3
        if self.times == 0:
            trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_a_validation_at_the_end_of_what_is_left_out_is_not_missed_by_a_resumed_run(tmp_path):
    found, path = [], str(tmp_path / "stopped.ckpt")
    for resume in (None, path):
        counts = Counts()
        if resume:
            with pytest.raises(SystemExit):
                fitted(Validated, data(), rollback(), Breaks(path, 2), val_check_interval=6)
        trainer = fitted(Validated, data(), rollback(), Breaks(path, -1), counts, resume=resume, val_check_interval=6)
        found.append((counts.places, trainer.fit_loop.epoch_loop._batches_that_stepped))
    assert found == [([(6, 5), (12, 11)], 11)] * 2


def test_a_loader_that_is_ahead_of_the_saved_batches_is_refused(tmp_path):
    path = str(tmp_path / "stopped.ckpt")
    with pytest.raises(SystemExit):
        run(Scheduled, Places(data()), rollback(), Breaks(path, 2))
    with pytest.raises(RuntimeError, match=r"saved while .* the place of the Places in it is beyond .* saved before\."):
        run(Scheduled, Places(data()), rollback(), resume=path)
    with pytest.raises(SystemExit):
        run(Scheduled, Places(data()), rollback(), Breaks(path, 1))
    assert run(Scheduled, Places(data()), rollback(), resume=path).global_step == 12


class Sometimes(Scheduled):
    def training_step(self, batch, batch_idx):
        return None if batch[0].sum() > 0 else super().training_step(batch, batch_idx)


class Searching(Small):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), 0.05, max_iter=3)


class Heard(Callback):
    """Losses by batch, each evaluation."""

    def __init__(self):
        self.losses = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.now = self.losses.setdefault(batch_idx, [])

    def on_before_backward(self, trainer, pl_module, loss):
        self.now.append(loss.item())


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize(("model", "number"), [(Sometimes, 5), (Searching, 12)])
def test_a_step_is_judged_once_and_only_with_a_loss(model, number):
    heard, callback = Heard(), rollback("spike")
    run(model, data(), heard, callback)
    losses = [losses[0] for losses in heard.losses.values() if losses]
    assert len(losses) == number
    assert callback.state_dict()["spikes"]["loss"] == losses
    compared(weights(run(model, data(poisoned=[9]), rollback())), weights(run(model, data(without=[9]))))


class Watching(Small):
    """Its schedule watches the loss of every step."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.9)
        return [optimizer], [{"scheduler": plateau, "interval": "step", "monitor": "loss"}]


def test_schedules_that_watch_steps_hear_of_those_that_count():
    found, clean = run(Watching, data(poisoned=[5]), rollback()), run(Watching, data(without=[5]))
    schedules = [trainer.lr_scheduler_configs[0].scheduler.state_dict() for trainer in (found, clean)]
    assert schedules[0] == schedules[1]
    assert schedules[0]["last_epoch"] == 11
    compared(weights(found), weights(clean))


def test_on_retry_may_not_change_the_windows():
    def accumulate(trainer, pl_module, retry):
        trainer.accumulate_grad_batches = 2

    with pytest.raises(RuntimeError, match=r"accumulate_grad_batches from 1 to 2, .*BatchSizeGrowth"):
        run(Scheduled, data(poisoned=[5]), rollback(on_retry=accumulate))
