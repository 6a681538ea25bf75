"""Batches that grow by accumulation are those that a loop written by hand is given, in every layout and after a stop."""

import logging

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.optim.lr_scheduler import MultiStepLR
from torch.testing import assert_close
from torch.utils.data import DataLoader

from lightning_hybrid.callbacks import BatchSizeGrowth, LearningRateScaling
from lightning_hybrid.callbacks.rate_factors import RateFactors
from tests.launch import run_trainers
from tests.small import Small, hybrid, loader, samples, trainer_of, weights
from tests.test_resuming import Stateful

SAMPLES, BATCH = 32, 4
GROWTH = {"milestones": {1: 2, 2: 4}, "max_batch": 16}  # 4 samples a step, then 8, then 16 and half of the rate
PLAN = [(4, 1.0)] * 8 + [(8, 1.0)] * 4 + [(16, 0.5)] * 2


class Net(Small):
    depth = 2


class Seen(Callback):
    """Batch and rate factor of each applied step, where windows begin, and what is logged."""

    def __init__(self):
        self.steps, self.logged, self.count = [], [], 0

    def on_train_start(self, trainer, pl_module):
        self.count = RateFactors.of(trainer.optimizers[0]).steps

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        factors = RateFactors.of(trainer.optimizers[0])
        if factors.steps > self.count:
            self.count = factors.steps
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            self.steps.append((metrics["global_batch_size"], factors.effective_rates[0] / 0.02))
            self.logged.append(metrics)


def fitted(callback, strategy="auto", data=1, module=None, train=None, **options):
    """A fit; what its steps had, and the weights at its end."""
    seen, others = Seen(), options.pop("others", [])
    options = {"max_epochs": 3, "log_every_n_steps": 1, **options}
    resume = options.pop("resume", None)
    trainer = trainer_of(strategy, callbacks=[callback, *others, seen], **options)
    trainer.fit(module or Net(), train or loader(SAMPLES, BATCH, data), ckpt_path=resume)
    return seen, dict(weights(trainer))


def by_hand(plan, epochs=1):
    """Weights after the steps of a plan, (samples, factor of the rate), written without Lightning."""
    module, (x, y), start = Net(), samples(SAMPLES).tensors, 0
    optimizer = torch.optim.SGD(module.parameters(), 0.02, momentum=0.9)
    for size, factor in plan:
        optimizer.param_groups[0]["lr"] = 0.02 * factor
        optimizer.zero_grad()
        module.loss((x[start : start + size], y[start : start + size])).backward()
        optimizer.step()
        start = (start + size) % SAMPLES
    return dict(module.state_dict())


def test_growth_is_the_same_batches_given_directly_and_then_rates_fall():
    seen, found = fitted(BatchSizeGrowth(**GROWTH))
    assert seen.steps == PLAN
    assert_close(found, by_hand(PLAN), rtol=1e-12, atol=1e-14)


STRATEGIES = {
    "ddp": (2, 2, lambda: "ddp"),
    "plain": (1, 1, lambda: hybrid(1, microbatches=1)),  # one process that accumulates later only
    "micro-batches": (1, 1, lambda: hybrid(1)),
    "zero3": (2, 2, lambda: hybrid(1, zero_stage=3)),
    "pipeline": (4, 2, hybrid),
}


def grown_in(name):
    _, data, make = STRATEGIES[name]
    seen, found = fitted(BatchSizeGrowth(**GROWTH), make(), data, use_distributed_sampler=False)
    return seen.steps, found


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_layout_gives_the_numbers_of_the_loop_by_hand(name):
    steps, found = run_trainers(STRATEGIES[name][0], grown_in, name)[0]
    assert steps == PLAN
    assert_close(found, by_hand(PLAN), rtol=1e-9, atol=1e-12)
