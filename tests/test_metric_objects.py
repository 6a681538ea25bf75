"""torchmetrics objects, whatever their states: every rank shows the values of one process."""

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, RichProgressBar, TQDMProgressBar
from torch import nn
from torchmetrics import (
    CatMetric,
    MeanAbsoluteError,
    MeanMetric,
    MeanSquaredError,
    Metric,
    MetricCollection,
    PearsonCorrCoef,
    R2Score,
    SpearmanCorrCoef,
    SumMetric,
)

from tests.launch import run_trainers
from tests.small import LAYOUTS, Small, Watch, assert_same, check_refused, fit, hybrid, loader

pytestmark = pytest.mark.filterwarnings("ignore:Metric `.*` will save all targets and predictions")
FLOAT32 = 1e-5  # of torchmetrics' states


class Worst(Metric):
    """The largest error, and the mean over replicas of how many updates there were."""

    def __init__(self):
        super().__init__()
        self.add_state("worst", torch.zeros((), dtype=torch.float64), dist_reduce_fx="max")
        self.add_state("level", torch.zeros(()), dist_reduce_fx="mean")

    def update(self, prediction, target):
        self.worst = torch.maximum(self.worst, (prediction - target).abs().max())
        self.level = torch.tensor(2.0)

    def compute(self):
        return self.worst + self.level


def of(metric, *batch):
    return metric(*(tensor.squeeze(1) for tensor in batch))


class WithMetrics(Small):
    """Metrics logged as objects after forward, after update, from a collection, and by value at an epoch's end."""

    def __init__(self):
        super().__init__()
        self.mean, self.total = MeanMetric(), SumMetric()
        self.squared, self.pearson = (
            MeanSquaredError(),
            PearsonCorrCoef(),
        )
        self.nested = nn.ModuleDict({"inner": nn.ModuleList([Worst()])})
        several = {"abs": MeanAbsoluteError(), "squared": MeanSquaredError()}
        self.several = MetricCollection(several, prefix="train_")
        self.spearman, self.all = SpearmanCorrCoef(), CatMetric()
        self.val_squared = MeanSquaredError()
        self.val_several = MetricCollection([MeanAbsoluteError(), R2Score()], prefix="val_")
        self.by_hand = MeanAbsoluteError()

    def training_step(self, batch, batch_idx):
        y, out = batch[1], self(batch[0])
        loss = (out - y).square().mean()
        self.mean((out - y).square())
        self.log("mean", self.mean, on_step=True, on_epoch=True, prog_bar=True)
        self.total.update(y)
        self.log("total", self.total, on_step=False, on_epoch=True)
        of(self.squared, out, y)
        self.log("squared", self.squared)
        of(self.pearson.update, out, y)
        self.log("pearson", self.pearson, on_step=False, on_epoch=True)
        of(self.nested["inner"][0], out, y)
        self.log("worst", self.nested["inner"][0], on_step=True, on_epoch=True)
        of(self.several, out, y)
        self.log_dict(self.several, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        y, out = batch[1], self(batch[0])
        for metric in (self.spearman, self.val_squared, self.val_several, self.by_hand):
            metric.update(out.squeeze(1), y.squeeze(1))
        self.log("spearman", self.spearman)
        self.log("val_squared", self.val_squared, on_step=False, on_epoch=True, prog_bar=True)
        self.log_dict(self.val_several)
        self.all.update(out.squeeze(1))
        return (out - y).square().mean()

    def on_validation_epoch_end(self):
        self.log("by_hand", self.by_hand.compute())
        self.by_hand.reset()
        self.log("sorted", (self.all.compute().sort().values * torch.arange(5)).sum())
        self.all.reset()


def watched(model, layout, **options):
    pipeline, data, chunks = layout
    watch, train, val = Watch(), loader(10, 4, data), loader(5, 4 // data, seed=1)
    strategy = hybrid(pipeline, chunks, 3) if pipeline else "auto"
    module = model()
    fit(module, train, strategy, val, max_epochs=2, callbacks=[watch], log_every_n_steps=1, **options)
    return watch.seen


@pytest.fixture(scope="module")
def reference():
    return watched(WithMetrics, (0, 1, 1), num_sanity_val_steps=0)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_shows_the_values_of_one_process(layout, reference):
    assert {"callback_metrics spearman", "callback_metrics val_R2Score", "callback_metrics by_hand"} <= set(
        reference[-1][1]
    )
    for seen in run_trainers(layout[0] * layout[1], without_sanity_check, layout):
        assert_same(seen, reference, FLOAT32)


def without_sanity_check(layout):
    return watched(WithMetrics, layout, num_sanity_val_steps=0)


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
def test_sanity_check_leaves_nothing_in_the_metrics(layout, reference):
    """In its own moments it shows part of the validation data."""
    for seen in run_trainers(layout[0] * layout[1], watched, WithMetrics, layout):
        assert_same(seen[-len(reference) :], reference, FLOAT32)


def behind_a_bar(bar):
    """Only rank 0 has a bar, and it asks for values of the epoch before anybody else does."""
    options = {"callbacks": [bar(), EarlyStopping("val_squared")], "enable_progress_bar": True, "max_epochs": 2}
    trainer = fit(WithMetrics(), loader(10, 4, 2), hybrid(2, 1, 3), loader(5, 2, seed=1), **options)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar], ids=lambda bar: bar.__name__)
def test_progress_bar_of_rank_0_holds_nobody_up(bar, reference):
    for found in run_trainers(4, behind_a_bar, bar):
        expected = {name.removeprefix("callback_metrics "): value for name, value in reference[-1][1].items()}
        assert found == pytest.approx({name: expected[name] for name in found}, rel=FLOAT32)
        assert {"mean_epoch", "spearman", "by_hand"} <= set(found)


class StepDependent(Small):
    def __init__(self):
        super().__init__()
        self.squared = MeanSquaredError(dist_sync_on_step=True)


class NotAnAttribute(Small):
    def training_step(self, batch, batch_idx):
        metric = MeanMetric()
        metric.update(batch[1])
        self.log("lost", metric)
        return self.loss(batch)


class OfAnotherStage(Small):
    """Block 0's output is on an earlier stage than the code that measures it."""

    def __init__(self):
        super().__init__()
        self.squared = MeanSquaredError()

    def training_step(self, batch, batch_idx):
        x = kept = self.blocks[0](self.inlet(batch[0]))
        for block in self.blocks[1:]:
            x = block(x)
        self.squared(kept, batch[0])
        self.log("squared", self.squared)
        return self.outlet(x).mean()


def test_metric_that_ranks_cannot_agree_on_is_refused_on_every_rank():
    check_refused(
        {
            StepDependent: "squared has dist_sync_on_step=True, .* Leave it False",
            NotAnAttribute: "self.log.'lost', metric.: the metric is not an attribute of the LightningModule",
            OfAnotherStage: "the metric squared reads a value of blocks.0, which lives on an earlier pipeline stage",
        }
    )
