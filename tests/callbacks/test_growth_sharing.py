"""Batches that grow by accumulation first, and then by micro-batches of a pipeline's schedule."""

import logging
import re

import pytest
from lightning.pytorch import Callback
from torch.testing import assert_close
from torch.utils.data import DataLoader

from lightning_hybrid.callbacks import BatchSizeGrowth
from tests.callbacks.test_batch_size_growth import BATCH, GROWTH, PLAN, SAMPLES, Net, Saving, by_hand, fitted
from tests.launch import run_trainers
from tests.small import fit, hybrid, loader, samples

RUNS = [[2] * 8, [2] * 8, [4] * 4]  # micro-batches of the runs of each epoch
LAYOUTS = {
    "replicas of a pipeline": (4, 2, hybrid),
    "interleaved": (2, 1, lambda: hybrid(chunks=2)),
    "zero 3": (2, 2, lambda: hybrid(1, zero_stage=3)),
}


class Deep(Net):
    depth = 4


class Runs(Callback):
    """Micro-batches of each run, by the epoch."""

    def __init__(self):
        self.runs = [[], [], []]

    def on_train_start(self, trainer, pl_module):
        def observe(step, work):
            self.runs[trainer.current_epoch].append(len(step.sizes))
            return work

        trainer.strategy.assembly.engine.observers.append(observe)


def growth(**options):
    """Steps of one loader batch, of two that are accumulated, and of two runs of two batches each."""
    return BatchSizeGrowth(**{**GROWTH, "max_accumulate": 2, "max_microbatches": 4, **options})


def grown(name):
    _, data, make = LAYOUTS[name]
    runs = Runs()
    module = Deep() if name == "interleaved" else Net()
    seen, found = fitted(growth(), make(), data, module, others=[runs], use_distributed_sampler=False)
    return seen.steps, runs.runs, found


@pytest.mark.parametrize("name", LAYOUTS)
def test_more_micro_batches_are_the_same_batches_given_directly(name):
    steps, runs, found = run_trainers(LAYOUTS[name][0], grown, name)[0]
    assert (steps, runs) == (PLAN, RUNS)
    module = Deep() if name == "interleaved" else Net()
    assert_close(found, by_hand(PLAN, module), rtol=1e-9, atol=1e-12)


def resumed(folder, first, second, data):
    """Saved in the second epoch; the limits, and the layout, may be others when the run goes on."""
    path, train = folder / "middle.ckpt", DataLoader(samples(SAMPLES), BATCH // data)
    _, whole = fitted(growth(**first), hybrid(), others=[Saving(path, 2)])
    strategy = hybrid() if data == 1 else hybrid(1, zero_stage=3, microbatches=1)
    return whole, fitted(growth(**second), strategy, train=train, resume=path)[1]


LONG, SHORT = {"max_accumulate": 1, "max_microbatches": 8}, {"max_accumulate": None, "max_microbatches": None}


@pytest.mark.parametrize(("first", "second", "data"), [(LONG, SHORT, 1), (SHORT, LONG, 1), (LONG, {}, 2)])
def test_a_run_goes_on_with_other_limits(first, second, data, tmp_path):
    whole, found = run_trainers(2, resumed, tmp_path, first, second, data)[0]
    assert_close(found, whole, rtol=1e-9, atol=1e-12)


class Cutting(Net):
    def split_batch(self, batch, num_microbatches):
        return list(zip(*(each.tensor_split(num_microbatches) for each in batch), strict=True))


REFUSED = {
    "stock": (Net, lambda: "auto", "micro-batches, and SingleDeviceStrategy has no such schedule"),
    "own parts": (Cutting, lambda: hybrid(1), "Cutting has split_batch for others"),
    "too few": (
        Net,
        lambda: hybrid(1, microbatches=8),
        "max_microbatches=4): a batch of the loader has 8 micro-batches already",
    ),
}


def refused():
    for make, strategy, message in REFUSED.values():
        module = make()
        with pytest.raises(ValueError, match=re.escape(message)):
            fit(module, loader(SAMPLES, BATCH), strategy(), callbacks=[growth()])
        assert_close(module.state_dict(), make().state_dict(), rtol=0, atol=0)


def test_what_has_no_longer_runs_is_refused_before_a_step():
    run_trainers(1, refused)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_accumulate": 2}, "Give it with one of them, or none"),
        ({"max_microbatches": 4}, "Give it with one of them, or none"),
        ({"max_accumulate": 0, "max_microbatches": 4}, "max_accumulate=0"),
        ({"max_accumulate": 1, "max_microbatches": 1.5}, "max_microbatches=1.5"),
    ],
)
def test_limits_without_effect_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        BatchSizeGrowth([1], **given)


def told():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("lightning.pytorch").addHandler(handler)
    fitted(growth(), hybrid(1))
    logging.getLogger("lightning.pytorch").removeHandler(handler)
    return [line for line in lines if line.startswith("BatchSizeGrowth")]


def test_what_is_joined_is_told():
    first, second = run_trainers(1, told)[0]
    assert "8 samples (before: 4) = 4 x 2 accumulated x 1 replicas; learning rates x 1" in first
    assert "16 samples (before: 8) = 4 x 2 joined x 2 accumulated x 1 replicas; learning rates x 0.5" in second
