"""Validation and test look at every sample exactly once, whatever the number of samples, loaders and replicas."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric, Metric, SumMetric
from torchmetrics.utilities import dim_zero_cat

from tests.launch import run_trainers
from tests.small import Small, hybrid, loader, samples, trainer_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders"),  # no sample is repeated here
    pytest.mark.filterwarnings("ignore:The ``compute`` method of metric .* was called before"),  # of local rank 0 only
]
LAYOUTS = [(1, 2), (2, 2), (2, 1)]  # pipeline, data
NUMBERS = [1, 2, 3, 5, 8]  # samples; batches have 2 a replica


class Median(Metric):
    """Keeps a list of everything."""

    def __init__(self):
        super().__init__()
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, values):
        self.values.append(values.flatten())

    def compute(self):
        return dim_zero_cat(self.values).median()


class Counting(Small):
    """Counts samples in every way in which they can be counted, under the names of its loaders."""

    def __init__(self):
        super().__init__()
        self.count, self.mean, self.median = SumMetric(), MeanMetric(), Median()

    def step(self, batch, loader):
        x, y = batch
        error = (self(x) - y).square()
        self.log("count", torch.ones(len(x)).sum(), reduce_fx="sum")
        self.log("loss", error.mean(), prog_bar=True)
        self.log("largest", y.max(), reduce_fx="max")
        self.log(f"own_{loader}", y.sum(), reduce_fx="sum", add_dataloader_idx=False)
        if loader == 0:
            self.count.update(torch.ones(len(x)))
            self.mean.update(error.mean(), weight=len(x))
            self.log("metric_count", self.count)
            self.median.update(y)
            self.log("metric_mean", self.mean)
            self.log("metric_median", self.median)
        return error.mean()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        return self.step(batch, dataloader_idx)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        return self.step(batch, dataloader_idx)


def evaluated(function, numbers, layout, batch=2):
    """What an evaluation of loaders of the given numbers of samples returns and leaves in the callback metrics."""
    trainer = trainer_of(hybrid(layout[0], microbatches=2) if layout else "auto")
    loaders = [DataLoader(samples(number, seed=number), batch) for number in numbers]
    results = getattr(trainer, function)(Counting(), loaders if len(loaders) > 1 else loaders[0], verbose=False)
    return results, {name: float(value) for name, value in trainer.callback_metrics.items()}


def alone_and_together(layout):
    alone = [evaluated(function, [number], layout) for function in ("validate", "test") for number in NUMBERS]
    return [*alone, *(evaluated("validate", numbers, layout) for numbers in ([1, 3], [5, 2, 8]))]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_sample_of_every_loader_counts_once(layout):
    expected = alone_and_together(None)
    assert [metrics.get("count") for _, metrics in expected] == [*NUMBERS, *NUMBERS, None, None]
    assert [expected[-1][1][f"count/dataloader_idx_{i}"] for i in range(3)] == [5, 2, 8]
    for outcomes in run_trainers(layout[0] * layout[1], alone_and_together, layout):
        for case, (outcome, reference) in enumerate(zip(outcomes, expected, strict=True)):
            assert_equal(outcome, reference, case)


def assert_equal(outcome, expected, case):
    (results, metrics), (reference_results, reference_metrics) = outcome, expected
    assert metrics == pytest.approx(reference_metrics, rel=1e-6), case
    assert results == [pytest.approx(result, rel=1e-6) for result in reference_results], case


class Stream(IterableDataset):
    """Samples `first`, `first + every`, ... of the dataset, and nobody knows how many they are."""

    def __init__(self, number, first, every):
        self.dataset, self.first, self.every = samples(number, seed=number), first, every

    def __iter__(self):
        for index in range(self.first, len(self.dataset), self.every):
            yield self.dataset[index]


class Streaming(Counting):
    """Gives each replica its share itself, as an iterable dataset must."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def val_dataloader(self):
        share = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        return DataLoader(Stream(self.number, share["rank"], share["num_replicas"]), 2)


def streamed(layout, numbers=(1, 3, 5, 7)):
    found = []
    for number in numbers:
        trainer = trainer_of(hybrid(layout[0], microbatches=2) if layout else "auto")
        results = trainer.validate(Streaming(number), verbose=False)
        found.append((results, {name: float(value) for name, value in trainer.callback_metrics.items()}))
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_stream_without_length_counts_once(layout):
    """With 1 sample for 2 replicas one of them has none; with 5 and 7 one of them has a batch more."""
    expected = streamed(None)
    for outcomes in run_trainers(layout[0] * layout[1], streamed, layout):
        for outcome, reference in zip(outcomes, expected, strict=True):
            assert_equal(outcome, reference, layout)


class FitAndValidate(Counting):
    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def val_dataloader(self):
        return [DataLoader(samples(number, seed=number), 2) for number in (3, 1)]


def fitted(layout, limit):
    trainer = trainer_of(hybrid(layout[0], microbatches=2), max_epochs=2, num_sanity_val_steps=1, **limit)
    trainer.fit(FitAndValidate(), DataLoader(samples(8), 2))
    return {name: float(v) for name, v in trainer.callback_metrics.items() if name.startswith(("count", "own"))}


@pytest.mark.parametrize(("limit", "counts"), [({}, [3, 1]), ({"limit_val_batches": 1}, None)], ids=str)
def test_validation_while_training_counts_once(limit, counts):
    """A limit is a number of batches of each replica, as everywhere in Lightning."""
    for layout in LAYOUTS[:2]:
        for found in run_trainers(layout[0] * layout[1], fitted, layout, limit):
            expected = counts or [min(3, 2 * layout[1]), 1]
            assert [found[f"count/dataloader_idx_{i}"] for i in range(2)] == expected


class OwnParameter(Small):
    """Reads a parameter of its own on the first stage, and keeps what validation saw, as users do."""

    def __init__(self):
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(6, dtype=torch.float64))
        self.losses = []

    def forward(self, x):
        return super().forward(x + self.shift)

    def validation_step(self, batch, batch_idx):
        self.losses.append(self.loss(batch).detach())

    def on_validation_epoch_end(self):
        self.log("val_loss", torch.stack(self.losses).mean())
        self.losses.clear()


def kept(layout):
    strategy = hybrid(layout[0], microbatches=1) if layout else "auto"
    trainer = trainer_of(strategy, max_epochs=2, num_sanity_val_steps=0)
    share = 4 // (layout[1] if layout else 1)
    val = DataLoader(samples(8, seed=1), share)
    trainer.fit(OwnParameter(), loader(8, 4, layout[1] if layout else 1), val)
    return float(trainer.callback_metrics["val_loss"])


@pytest.mark.parametrize("layout", [(2, 1), (2, 2)], ids=str)
def test_hooks_see_lists_beside_a_parameter_that_another_stage_has(layout):
    expected = kept(None)
    assert run_trainers(layout[0] * layout[1], kept, layout) == pytest.approx([expected] * layout[0] * layout[1])
