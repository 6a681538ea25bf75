"""The noise scale of a loss whose noise is known, and of a network against gradients by hand, in every layout."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset
from torchmetrics import MetricCollection

from lightning_hybrid import HybridPTDPStrategy
from lightning_hybrid.callbacks import GradientNoiseScaleMonitor
from lightning_hybrid.functional.noise_scale import GradientSums
from lightning_hybrid.metrics import GradientNoiseScale
from tests.launch import run_trainers
from tests.small import fit

DIM, STEPS, BATCH = 3200, 16, 8
ORDER = [0, 2, 1, 3, 4, 6, 5, 7]  # of a batch's samples in one process: two replicas take turns


class Term(nn.Module):
    """Adds ``1/2 w H w - n w`` to each sample's loss, the last column; the sample's noise is before it."""

    def __init__(self, columns):
        super().__init__()
        self.columns, half = columns, DIM // 2
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, half, dtype=torch.float64))
        self.register_buffer("curvature", torch.linspace(0.2, 1.0, half, dtype=torch.float64))

    def forward(self, x):
        quadratic = (self.weight * self.curvature * self.weight).sum() / 2
        linear = x[:, self.columns] @ self.weight
        return torch.cat([x[:, :-1], x[:, -1:] + (quadratic - linear)[:, None]], 1)


class Quadratic(LightningModule):
    """At a rate of 0 the gradient ``H w`` keeps its value."""

    def __init__(self):
        super().__init__()
        self.terms = nn.ModuleList([Term(slice(0, DIM // 2)), Term(slice(DIM // 2, DIM))])

    def training_step(self, batch, batch_idx):
        (x,) = batch
        for term in self.terms:
            x = term(x)
        return x[:, -1].mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)

    def closed_form(self):
        gradient = torch.cat([term.curvature * term.weight.detach() for term in self.terms])
        return float(variances().sum() / gradient.square().sum())


def variances():
    return torch.linspace(0.5, 7.5, DIM, dtype=torch.float64)


def noisy(data=1):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(STEPS * BATCH, DIM, generator=generator, dtype=torch.float64) * variances().sqrt()
    dataset = TensorDataset(torch.cat([noise, torch.zeros(len(noise), 1, dtype=torch.float64)], 1))
    if data == 1:
        order = [start + place for start in range(0, len(dataset), BATCH) for place in ORDER]
        return Subset(dataset, order), None
    return dataset, DistributedSampler(dataset, data, torch.distributed.get_rank() % data, shuffle=False)


def measured(strategy, data=1, accumulate=1):
    """Moments of the quadratic loss after all steps, each of four gradients of two samples."""
    monitor = GradientNoiseScaleMonitor(GradientNoiseScale(decay=1))
    dataset, sampler = noisy(data)
    train = DataLoader(dataset, BATCH // data // accumulate, sampler=sampler)
    fit(Quadratic(), train, strategy, callbacks=[monitor], accumulate_grad_batches=accumulate)
    assert monitor.metric.steps == STEPS
    return monitor.metric.moments


def measured_by_layout(layouts):
    """On a rank."""
    found = {}
    for name, (options, data, accumulate) in layouts.items():
        strategy = "ddp" if options is None else HybridPTDPStrategy(num_microbatches=BATCH // 2 // data, **options)
        found[name] = measured(strategy, data, accumulate)
    return found


def test_known_noise_is_measured_alike_in_every_layout():
    """Within 5 %: ``|g|^2`` has a relative variance of ``(4 s + 2 s^2) / DIM`` a step, with ``s = B_simple / BATCH``.

    Noise of the same variance everywhere has that; ``s`` is about 1 here, so that the mean of 16 steps has a standard
    deviation of 1.1 %, and that of the variance has far less.
    """
    expected = Quadratic().closed_form()
    reference = measured("auto", accumulate=4)
    assert 0.5 * BATCH < expected < 2 * BATCH
    assert reference.noise / reference.signal == pytest.approx(expected, rel=0.05)
    alone = {"pipeline_parallel_size": 1}
    two = {
        "ddp": (None, 2, 2),
        "zero 1": (alone | {"zero_stage": 1}, 2, 1),
        "zero 3": (alone | {"zero_stage": 3}, 2, 1),
    }
    four = {
        "2 x 2": ({"pipeline_parallel_size": 2}, 2, 1),
        "2 x 2, zero 3": ({"pipeline_parallel_size": 2, "zero_stage": 3}, 2, 1),
    }
    for ranks in (run_trainers(2, measured_by_layout, two), run_trainers(4, measured_by_layout, four)):
        assert all(found == ranks[0] for found in ranks)
        for layout, found in ranks[0].items():
            assert found == pytest.approx(tuple(reference), rel=1e-9), layout


def test_metrics_of_a_collection_keep_their_own_decay():
    decays = {"short": 0.5, "mean": 1.0}
    collection = MetricCollection({name: GradientNoiseScale(decay) for name, decay in decays.items()})
    sums = GradientSums.of([(3.0, 2, 0.5), (5.0, 2, 0.5)])  # mean 4, freedom 1/4
    for square in (3.75, 3.5):
        collection.update(sums, square)  # noises 1 and 2, signals 3.5 and 3
    found = {name: float(value) for name, value in collection.compute().items()}
    assert found == pytest.approx({"short": (0.5 + 2) / (1.75 + 3), "mean": (1 + 2) / (3.5 + 3)}, rel=1e-12)
