"""Models on the meta device with what a Trainer does besides: checkpoints, summaries, measured costs, refusals."""

import re

import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary
from torch import nn
from torch.testing import assert_close

from lightning_hybrid import measure_costs
from tests.launch import run_trainers
from tests.meta_models import WIDTH, Meta, Tied, word_loader, words
from tests.small import fit, hybrid, trainer_of, weights
from tests.test_meta import run

ZERO3 = {"pipeline": 1, "zero_stage": 3}


class Unwritten(Meta):
    """A positional table that no method writes."""

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.empty(WIDTH))

        def forward(self, x):
            return x + self.table

    def build(self):
        super().build()
        self.blocks.append(self.Table())


class Decay(Meta):
    """The loss goes over all weights."""

    def loss(self, words):
        return super().loss(words) + 0.01 * sum(p.square().sum() for p in self.parameters())


class Child(Meta):
    """A block's child is called alone."""

    def forward(self, words):
        return super().forward(words) + self.blocks[2].norm(self.embed(words)).sum() * 0


class Caught(Meta):
    """An error inside of a block is the user's own."""

    class Failing(nn.Linear):
        def forward(self, x):
            raise ArithmeticError("of a block")

    def build(self):
        super().build()
        self.blocks[1] = self.Failing(WIDTH, WIDTH)


def refused(cases):
    found = []
    for model, layout in cases:
        with pytest.raises((ValueError, RuntimeError, ArithmeticError)) as caught:
            run(model(), hybrid(**layout), 1 if layout["pipeline"] == 2 else 2, num_sanity_val_steps=0)
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    return found


def test_what_cannot_start_is_refused_on_every_rank():
    cases = [
        (Unwritten, {"pipeline": 2}, r"ValueError: blocks\.4\.table is on the meta device.*Table\.reset_parameters"),
        (Unwritten, ZERO3, r"ValueError: blocks\.4\.table is on the meta device"),
        (Decay, ZERO3, r"RuntimeError: blocks\.0\.norm\.weight is read while its block does not run.*zero_stage.*CPU"),
        (Child, ZERO3, r"RuntimeError: blocks\.2\.norm\.weight is read while its block does not run"),
        (Caught, ZERO3, "ArithmeticError: of a block"),
    ]
    for messages in run_trainers(2, refused, [case[:2] for case in cases]):
        for message, (*_, pattern) in zip(messages, cases, strict=True):
            assert re.search(pattern, message, re.DOTALL), message


def resumed(layouts, folder):
    found = []
    for number, (first, second) in enumerate(layouts):
        path = folder / f"{number}.ckpt"
        run(Tied(), hybrid(**first), 1 if first["pipeline"] == 2 else 2).save_checkpoint(path)
        data = 1 if second["pipeline"] == 2 else 2
        trainer = trainer_of(hybrid(**second), max_epochs=2, gradient_clip_val=0.05, use_distributed_sampler=False)
        place = torch.distributed.get_rank() if data == 2 else 0
        trainer.fit(Tied(), word_loader(24, 8, data, place), word_loader(4, 2), ckpt_path=path)
        found.append((weights(trainer), trainer.global_step))
    return found


def test_a_run_goes_on_from_a_full_checkpoint(tmp_path):
    layouts = [({"pipeline": 2}, ZERO3), (ZERO3, {"pipeline": 2}), (ZERO3, ZERO3)]
    expected = run_trainers(1, longer)[0]
    for state, steps in run_trainers(2, resumed, layouts, tmp_path)[0]:
        assert steps == 6
        assert_close(dict(state), dict(expected), rtol=1e-9, atol=1e-12)


def longer():
    return weights(run(Tied(), hybrid(1, microbatches=1), max_epochs=2))


def saved_early(folder):
    """A checkpoint of before any step, between two validations and a fit."""
    trainer = trainer_of(hybrid(**ZERO3), use_distributed_sampler=False)
    module = Meta()
    (before,) = trainer.validate(module, word_loader(4, 2), verbose=False)
    streamed = trainer.strategy.assembly.engine.zero.streaming.active
    trainer.save_checkpoint(folder / "early.ckpt")
    whole = [p.is_meta for p in module.parameters()]
    (after,) = trainer.validate(module, word_loader(4, 2), verbose=False)
    trainer.fit(module, word_loader(24, 8, 2, torch.distributed.get_rank()), word_loader(4, 2))
    return before, after, streamed, any(whole), weights(trainer)


def test_saving_before_the_first_step_makes_a_rank_hold_everything(tmp_path):
    expected = run_trainers(1, unclipped)[0]
    before, after, streamed, is_meta, state = run_trainers(2, saved_early, tmp_path)[0]
    assert before == after
    assert streamed
    assert not is_meta
    assert_close(dict(state), dict(expected), rtol=1e-9, atol=1e-12)


def unclipped():
    return weights(fit(Meta(), word_loader(24, 8), hybrid(1, microbatches=1), word_loader(4, 2)))


class AtOnce(Meta):
    """Everything is made by the constructor."""

    def __init__(self):
        super().__init__()
        self.build()

    def configure_model(self):
        """Nothing is left to be made."""


def empty():
    trainer = trainer_of(hybrid(1, microbatches=1), precision="64-true")
    with trainer.init_module(empty_init=True):
        module = AtOnce()
    assert all(p.is_meta and p.dtype == torch.float64 for p in module.parameters())
    trainer.fit(module, word_loader(24, 8), word_loader(4, 2))
    with trainer.init_module():
        assert AtOnce().embed.weight.device.type == "cpu"
    return weights(trainer)


def test_an_empty_init_of_the_trainer_is_one_on_the_meta_device():
    assert_close(dict(run_trainers(1, empty)[0]), dict(run_trainers(1, unclipped)[0]), rtol=1e-9, atol=1e-12)


def summed_up():
    module, summary = Meta(), ModelSummary()
    module.example_input_array = words(2)[:][0][:, :-1]
    trainer = trainer_of(hybrid(1), callbacks=[summary], enable_model_summary=True)
    trainer.fit(module, word_loader(8, 4), word_loader(4, 2))
    assert module.example_input_array is not None
    return True


def test_a_summary_counts_what_is_not_there_yet():
    assert run_trainers(1, summed_up) == [True]


def test_costs_of_a_model_on_the_meta_device():
    module = Meta()
    costs = measure_costs(module, words(4)[:], num_runs=1)
    assert len(costs) == 4
    assert min(costs) > 0
    assert all(p.is_meta for p in module.parameters())
