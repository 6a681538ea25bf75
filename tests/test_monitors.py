"""Lightning's own callbacks and loggers decide and write what they would in one process."""

import csv
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    RichModelSummary,
)
from lightning.pytorch.loggers import CSVLogger

from tests.launch import run_trainers
from tests.small import LAYOUTS, Small, fit, hybrid, loader


class Overfitting(Small):
    """Its validation loss falls for some epochs and then rises."""

    rate = 0.003

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.rate, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 8))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def monitored(layout, folder):
    """What the callbacks have decided, on a rank or in one process."""
    pipeline, data, chunks = layout or (1, 1, 1)
    stopping = EarlyStopping("val_loss", patience=1)
    checkpoint = ModelCheckpoint(folder, "{epoch}-{val_loss:.5f}", monitor="val_loss", save_top_k=2, save_last=True)
    trainer = fit(
        Overfitting(),
        loader(10, 4, data),
        hybrid(pipeline, chunks, 3) if layout else "auto",
        loader(5, 4 // data, seed=1),
        max_epochs=20,
        callbacks=[stopping, checkpoint, LearningRateMonitor("step")],
        logger=CSVLogger(folder, name="log", version=""),
        enable_checkpointing=True,
        log_every_n_steps=2,
    )
    return {
        "epochs": trainer.current_epoch,
        "stopped": stopping.stopped_epoch,
        "best": Path(checkpoint.best_model_path).name,
        "kept": sorted(Path(path).name for path in checkpoint.best_k_models),
        "last": Path(checkpoint.last_model_path).name,
        "score": round(float(checkpoint.best_model_score), 9),
        "step": trainer.global_step,
    }


def rows(folder):
    with open(Path(folder, "log", "metrics.csv")) as file:
        return [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    return monitored(None, folder), folder


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_monitors_decide_as_in_one_process(layout, reference, tmp_path):
    """Case 6: the metric is known where it is monitored and where it is written."""
    expected, reference_folder = reference
    assert 2 < expected["stopped"] < 19
    assert run_trainers(layout[0] * layout[1], monitored, layout, tmp_path) == [expected] * layout[0] * layout[1]
    found, logged = rows(tmp_path), rows(reference_folder)
    assert len(found) == len(logged) > 8
    assert {"train_loss_step", "train_loss_epoch", "val_loss", "lr-SGD"} <= {name for row in logged for name in row}
    for row, logged_row in zip(found, logged, strict=True):
        assert row == pytest.approx(logged_row, rel=1e-6)
    best, last = (torch.load(tmp_path / expected[name], weights_only=True) for name in ("best", "last"))
    best_of_one = torch.load(reference_folder / expected["best"], weights_only=True)
    assert best["epoch"] < last["epoch"]
    torch.testing.assert_close(best["state_dict"], best_of_one["state_dict"])


SUMMARIES = []


class KeptSummary(ModelSummary):
    @staticmethod
    def summarize(*args, **kwargs):
        SUMMARIES.append((args, kwargs))


class KeptRichSummary(RichModelSummary):
    summarize = KeptSummary.summarize


def summarised(strategy):
    SUMMARIES.clear()
    strategy = hybrid(2) if strategy else "auto"
    fit(Small(), loader(8, 4), strategy, callbacks=[KeptSummary(max_depth=2)], enable_model_summary=True)
    return [_described(*summary) for summary in SUMMARIES]


def _described(args, kwargs):
    table, total, trainable, *_ = args
    return [(name, [str(cell) for cell in column]) for name, column in table], total, trainable


def test_summary_shows_the_whole_model_once():
    (expected,) = summarised(None)
    assert expected[1] == sum(parameter.numel() for parameter in Small().parameters())
    first, *others = run_trainers(2, summarised, True)
    assert first == [expected]
    assert others == [[]]


def fit_again(strategy):
    """The same callback in a second Trainer."""
    SUMMARIES.clear()
    callback = KeptRichSummary()
    for _ in range(2):
        fit(Small(), loader(8, 4), hybrid(2), callbacks=[callback], enable_model_summary=True)
    return len(SUMMARIES)


def test_summary_speaks_again_in_the_next_trainer():
    assert run_trainers(2, fit_again, True) == [2, 0]
