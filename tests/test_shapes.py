"""Sequences whose length changes from batch to batch: exact, and each shape is probed once."""

from unittest.mock import patch

import pytest
import torch
from torch.utils.data import DataLoader

from examples.gpt import GPT
from lightning_hybrid.parallel.pipeline import planner
from tests.launch import run_trainers
from tests.small import fit, hybrid, trainer_of, weights

LENGTHS = [9, 5, 7, 9, 3]  # of the training batches, in order
SIZES = [4, 4, 3, 1, 4]  # their samples, in two micro-batches
VALIDATION = [5, 4]


class Text(GPT):
    def __init__(self):
        torch.manual_seed(2)
        super().__init__(width=8, depth=4, heads=2, context=16)
        self.double()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def batches(lengths, sizes):
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(256, shape, generator=generator) for shape in zip(sizes, lengths, strict=True)]
    return DataLoader(texts, batch_size=None)


def trained(strategy):
    module = Text()
    trainer = fit(
        module, batches(LENGTHS, SIZES), strategy, batches(VALIDATION, [4] * 2), max_epochs=2, num_sanity_val_steps=0
    )
    return trainer, module


def counted(cases):
    """On a rank: weights, keys of all probes, how many of them were in the fit, and what a later validation says."""
    return [count_probes(options, bound) for options, bound in cases]


def count_probes(options, bound):
    keys, probe = [], planner.probe

    def count(cut, mesh, key, *args, **kwargs):
        keys.append(key)
        return probe(cut, mesh, key, *args, **kwargs)

    with patch.object(planner, "probe", count), patch.object(planner, "REMEMBERED", bound):
        trainer, module = trained(hybrid(**options))
        state, in_fit = weights(trainer), len(keys)
        trainer.validate(module, batches(VALIDATION, [4] * 2), verbose=False)
    shapes = [(mode[0], shape) for mode, (_, ((shape, *_),)) in keys]
    return state, shapes, in_fit, float(trainer.callback_metrics["val/bits_per_byte"])


@pytest.fixture(scope="module")
def expected():
    trainer, module = trained("auto")
    state = dict(weights(trainer))
    (found,) = trainer_of().validate(module, batches(VALIDATION, [4] * 2), verbose=False)
    return state, found["val/bits_per_byte"]


@pytest.fixture(scope="module")
def outcomes():
    """For each case: what either rank found."""
    return list(zip(*run_trainers(2, counted, [({}, 1024), ({"chunks": 2}, 1024), ({}, 2)]), strict=True))


TRAINED = {(2, 9), (2, 5), (2, 7), (1, 7), (1, 9), (2, 3)}
VALIDATED = {(2, 5), (2, 4)}


def test_lengths_that_change_every_batch_train_exactly(outcomes, expected):
    state, metric = expected
    for case in outcomes:
        for rank, (found, _, _, validated) in enumerate(case):
            torch.testing.assert_close(found, state if rank == 0 else {})
            assert validated == pytest.approx(metric, rel=1e-9)


def test_each_shape_is_probed_once(outcomes):
    for _, shapes, in_fit, _ in [*outcomes[0], *outcomes[1]]:
        assert len(set(shapes)) == len(shapes) == in_fit
        assert {shape for hook, shape in shapes if hook == "training_step"} == TRAINED
        assert {shape for hook, shape in shapes if hook == "validation_step"} == VALIDATED


def test_ranks_that_remember_few_plans_agree_when_to_probe(outcomes):
    (_, ours, *_), (_, theirs, *_) = outcomes[2]
    assert ours == theirs
    assert len(ours) > len(TRAINED) + len(VALIDATED)
