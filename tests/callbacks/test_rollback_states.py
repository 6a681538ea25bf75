"""What else a run goes back with: other callbacks, what is logged and saved, validations, loss scales."""

import csv
import os

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision

from lightning_hybrid import FP16MasterWeights
from lightning_hybrid.callbacks import (
    BatchSizeGrowth,
    DivergenceRollback,
    GradientNoise,
    GradientNoiseScaleMonitor,
    LearningRateScaling,
    LearningRateWarmup,
    OptimizerRestart,
)
from tests.callbacks.test_divergence_rollback import Scheduled, Stateful, compared, data
from tests.launch import run_trainers
from tests.small import fit, hybrid, trainer_of, weights

STATEFUL = {
    "scaling": lambda: [LearningRateScaling(8, "sqrt")],
    "warmup": lambda: [LearningRateWarmup(steps=9)],
    "warmup by samples": lambda: [LearningRateWarmup(samples=40)],
    "restart": lambda: [OptimizerRestart(every=5, rewarm=3)],
    "noise": lambda: [GradientNoise(eta=0.01)],
    "noise scale": lambda: [GradientNoiseScaleMonitor()],
    "average": lambda: [WeightAveraging()],
}
STATEFUL["all"] = lambda: [each for name in STATEFUL if name != "all" for each in STATEFUL[name]()]


class Logged(Scheduled):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=4)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


def run(model, loader, callbacks, **options):
    torch.manual_seed(1)
    return fit(model(), loader, callbacks=callbacks, **options)


@pytest.mark.parametrize("name", STATEFUL)
def test_callbacks_go_back_too(name, tmp_path):
    options = {"accumulate_grad_batches": 2, "max_epochs": 2}
    clean_callbacks, callbacks = STATEFUL[name](), STATEFUL[name]()
    clean = run(Stateful, data(without=[4, 5]), clean_callbacks, **options)
    rollback = DivergenceRollback(snapshot_every=4, audit=str(tmp_path / "audit.csv"))
    trainer = run(Stateful, data(poisoned=[5]), [*callbacks, rollback], **options)
    assert rollback.rollbacks == 2
    compared(weights(trainer), weights(clean))
    for found, expected in zip(callbacks, clean_callbacks, strict=True):
        assert str(found.state_dict()) == str(expected.state_dict())


def rows(folder):
    with open(next(folder.rglob("metrics.csv"))) as file:
        return list(csv.DictReader(file))


def test_logs_and_checkpoints_are_those_of_the_clean_run(tmp_path):
    found = {}
    for name, loader in (("clean", data(without=[7])), ("found", data(poisoned=[7]))):
        folder = tmp_path / name
        saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=3)
        rollback = DivergenceRollback(snapshot_every=5, audit=str(folder / "audit.csv"))
        logger = CSVLogger(str(folder), flush_logs_every_n_steps=1)
        options = {"max_epochs": 2, "logger": logger, "log_every_n_steps": 1, "enable_checkpointing": True}
        trainer = run(Logged, loader, [saving, rollback], val=data(2), val_check_interval=3, **options)
        files = {path.name: torch.load(path, weights_only=False)["state_dict"] for path in folder.glob("*.ckpt")}
        found[name] = rows(folder), files, trainer.callback_metrics
    assert found["found"][1].keys() == found["clean"][1].keys()
    for name, state in found["clean"][1].items():
        compared(found["found"][1][name], state)
    trained = [[row for row in kind[0] if row["loss_step"]] for kind in found.values()]
    assert [row["loss_step"] for row in trained[0]] == [row["loss_step"] for row in trained[1]]
    assert [row["step"] for row in trained[0]] == [row["step"] for row in trained[1]]
    epochs = [[row["loss_epoch"] for row in kind[0] if row["loss_epoch"]] for kind in found.values()]
    assert epochs[0] == epochs[1]


class Half(Scheduled):
    """In float32, for losses of 16 bits."""

    def __init__(self):
        super().__init__()
        self.float()

    def loss(self, batch):
        return super().loss([tensor.float() for tensor in batch])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)  # with a schedule Lightning goes on in steps that are skipped


def too_high(loss, norm):
    return loss > 5


def scaled(make, strategy, loader_of, *callbacks):
    """On a rank, or in one process: weights and steps of a run with a loss scale that is too large at first."""
    torch.manual_seed(1)
    trainer = trainer_of(strategy(), callbacks=list(callbacks), plugins=[make()], use_distributed_sampler=False)
    trainer.fit(Half(), loader_of)
    return {name: parameter.detach().clone() for name, parameter in trainer.lightning_module.named_parameters()}, (
        trainer.global_step,
        trainer.precision_plugin.state_dict(),
    )


def high(batch):
    """Labels of a batch are wrong, and finite."""
    loader = data()
    loader.dataset.samples.tensors[1][batch * 4 : batch * 4 + 4] = 4.0
    return loader


def mixed():
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=1))


def masters():
    return FP16MasterWeights(init_scale=2.0**9, growth_interval=1)


def both(make, strategy, path):
    """Of a run that never had batch 2, of one that goes back before it, and how often a run without it goes back."""
    rollback, idle = (DivergenceRollback(each, snapshot_every=3, audit=path) for each in (too_high, "nan"))
    expected, found = scaled(make, strategy, data(without=[2])), scaled(make, strategy, high(2), rollback)
    scaled(make, strategy, data(), idle)
    return expected, found, rollback.rollbacks, idle.rollbacks


def auto():
    return "auto"


def shards():
    return hybrid(1, zero_stage=2)


def test_a_loss_scale_goes_back_and_a_skipped_step_is_no_divergence(tmp_path):
    path = str(tmp_path / "audit.csv")
    for outcomes in ([both(mixed, auto, path)], run_trainers(2, both, masters, shards, path)):
        for (expected, of_expected), (found, of_found), rollbacks, idle in outcomes:
            assert (rollbacks, idle) == (1, 0)
            assert of_found == of_expected
            assert of_found[1]["scale"] < 2.0**20  # not all of 11 steps were applied
            compared(found, expected)


def growing(strategy, replicas, path, rollback):
    """On a rank, or in one process: a run whose batch has grown when batch 7 is bad, or which never had its window."""
    growth = BatchSizeGrowth([3, 9], max_batch=8, interval="step")
    callbacks = [growth, DivergenceRollback(audit=path)] if rollback else [growth]
    loader = data(poisoned=[7], replicas=replicas) if rollback else data(without=[6, 7], replicas=replicas)
    trainer = trainer_of(strategy(), callbacks=callbacks, max_epochs=2, use_distributed_sampler=False)
    trainer.fit(Scheduled(), loader)
    return dict(weights(trainer)), (trainer.global_step, growth.state_dict()["progress"])


def both_growing(strategy, replicas, path):
    """On a rank, or in one process."""
    return [growing(strategy, replicas, path, rollback) for rollback in (True, False)]


def test_a_run_goes_back_over_a_growth_of_its_batch(tmp_path):
    path = str(tmp_path / "audit.csv")
    for outcomes in ([both_growing(auto, 1, path)], run_trainers(4, both_growing, hybrid, 2, path)):
        for (found, of_found), (expected, of_expected) in outcomes:
            assert of_found == of_expected
            compared(found, expected, rtol=1e-9)


def judged(joined):
    """On a rank: what the steps of a growing run are judged by, and its weights when it goes back from one."""
    seen, limits = [], {"max_accumulate": 1, "max_microbatches": 8} if joined else {}

    def detector(loss, norm):
        seen.append((loss, norm))
        return len(seen) == 6

    growth = BatchSizeGrowth([2, 4], max_batch=16, interval="step", **limits)
    callbacks = [growth, DivergenceRollback(detector, audit=os.devnull)]
    trainer = trainer_of(hybrid(), callbacks=callbacks, max_epochs=2)
    trainer.fit(Scheduled(), data(16))
    return seen, dict(weights(trainer)), trainer.global_step


def test_joined_batches_are_judged_and_left_out_as_accumulated_ones():
    for joined, plain in zip(*(run_trainers(2, judged, each) for each in (True, False)), strict=True):
        assert joined[2] == plain[2]
        torch.testing.assert_close(torch.tensor(joined[0]), torch.tensor(plain[0]), rtol=1e-9, atol=0)
        compared(joined[1], plain[1], rtol=1e-9)
