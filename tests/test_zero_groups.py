"""Small blocks that are gathered and summed together, where only some of them are called, or not as often."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_hybrid.callbacks import CommunicationLedger
from lightning_hybrid.parallel.zero import units
from tests.launch import run_trainers
from tests.small import Small, fit, hybrid, loader, weights

BATCH, BATCHES = 12, 6


class Deep(Small):
    """Sixteen blocks are four units of four, or on two pipeline stages eight of two."""

    depth = 16

    def __init__(self):
        super().__init__()
        self.second = nn.Linear(6, 1).double()

    def order(self):
        return range(self.depth)

    def run(self, block, x):
        return block(x)

    def forward(self, x):
        x = self.inlet(x)
        for index in self.order():
            x = self.run(self.blocks[index], x)
        return self.outlet(x)


class Shuffled(Deep):
    """In another order than the units'."""

    def order(self):
        return [0, 9, 1, 8, 2, 15, 3, 14, 10, 4, 7, 5, 6, 11, 13, 12]


class Partial(Deep):
    """Some blocks of a unit, and in other steps none."""

    def order(self):
        return [[1, 2, 3, 5, 8, 9, 10, 11], [0, 3, 12, 13], range(16)][self.global_step % 3]


class Twice(Deep):
    """Blocks are called again, at once or later, within their unit's calls or behind them."""

    def order(self):
        return [0, 0, 1, 2, 3, 3, 1, *range(4, 16), 4, 5, 5, 0]


class Early(Deep):
    """The last blocks of a unit have no gradient: the loss is of what came before, beside what has none."""

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks[:5]:
            x = block(x)
        with torch.no_grad():
            y = self.blocks[5](x)
        for block in self.blocks[6:]:
            y = block(y)
        return self.outlet(x) + self.second(x).tanh() + 0 * y.detach().sum()


class Frozen(Deep):
    """One block of a unit is frozen, and all of another one."""

    def __init__(self):
        super().__init__()
        for block in (self.blocks[1], *self.blocks[4:8]):
            block.requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.rate, eps=1e-3)


class Thawed(Frozen):
    """Some of what was frozen."""

    def on_train_batch_start(self, *args):
        if self.global_step == 2:
            self.blocks[1].requires_grad_(True)
            self.blocks[5].requires_grad_(True)


class Checkpointed(Deep):
    reentrant = False

    def run(self, block, x):
        return checkpoint(block, x, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


class Read(Deep):
    """A block amid the others is read past its call."""

    def forward(self, x):
        return super().forward(x) + self.blocks[6].linear.bias.sum()


class Apart(Deep):
    """Each replica leaves out another block of one unit: all of their messages match."""

    def order(self):
        return [index for index in range(self.depth) if index != dist.get_rank()]


MODELS = [Deep, Shuffled, Partial, Twice, Early, Frozen, Thawed, Checkpointed, Reentrant, Read]


def blocks_of_units(trainer):
    return [len(unit.names) for unit in trainer.strategy.assembly.engine.data.units if unit.is_block]


def trained(models, stages, data, options):
    found = {}
    for model in models:
        for stage in stages:
            strategy = hybrid(zero_stage=stage, **options)
            trainer = fit(model(), loader(BATCHES * BATCH, BATCH, data), strategy, accumulate_grad_batches=2)
            found[model, stage] = blocks_of_units(trainer), weights(trainer)
    return found


def check(size, models, stages, expected_units, **options):
    data = size // options["pipeline"]
    found = run_trainers(size, trained, models, stages, data, options, timeout=300)
    for model in models:
        expected = weights(fit(model(), loader(BATCHES * BATCH, BATCH), accumulate_grad_batches=2))
        for stage in stages:
            numbers, state = found[0][model, stage]
            assert numbers == ([3] * 5 if model is Read else expected_units), model
            assert_close(state, expected, rtol=1e-9, atol=1e-12, msg=lambda m, c=(model, stage): f"{c}: {m}")


def test_units_of_several_blocks_train_as_in_one_process():
    check(2, MODELS, [2, 3], [4, 4, 4, 4], pipeline=1, microbatches=2)


@pytest.mark.full
def test_units_of_several_blocks_train_as_in_one_process_over_stages():
    check(4, [Deep, Frozen, Checkpointed], [1, 2, 3], [2, 2, 2, 2], pipeline=2, microbatches=3)


@pytest.mark.parametrize(("size", "option"), [(4, {"replicate_size": 2}), (2, {"cpu_offload": True})])
def test_units_of_several_blocks_may_have_copies_or_be_on_the_host(size, option):
    check(size, [Deep, Partial], [2, 3], [4, 4, 4, 4], pipeline=1, microbatches=2, **option)


def masters(stage):
    """Weights with units of several blocks, and of one each."""
    found = []
    for limit in (2**20, 0):
        units.GROUP_BYTES = limit
        options = {"precision": "bf16-true", "accumulate_grad_batches": 2}
        model, strategy = Thawed().float(), hybrid(1, microbatches=2, zero_stage=stage)
        trainer = fit(model, single(loader(BATCHES * BATCH, BATCH, 2)), strategy, **options)
        found.append((blocks_of_units(trainer), weights(trainer)))
    return found


def single(batches):
    return DataLoader([[x.float() for x in batch] for batch in batches], batch_size=None)


def both():
    return [masters(stage) for stage in (2, 3)]


def test_masters_in_units_of_several_blocks_are_those_of_units_of_one():
    """To the bit: two ranks add the same numbers."""
    for (grouped, state), (alone, expected) in run_trainers(2, both)[0]:
        assert (grouped, alone) == ([4] * 4, [1] * 16)
        assert_close(state, expected, rtol=0, atol=0)


def refused():
    for stage in (2, 3):
        with pytest.raises(RuntimeError, match=f"Replicas called different blocks.*zero_stage={stage}"):
            fit(Apart(), loader(BATCH, BATCH, 2), hybrid(1, microbatches=1, zero_stage=stage))
    return True


def test_replicas_that_call_different_blocks_of_one_unit_are_refused():
    assert run_trainers(2, refused) == [True, True]


def messages():
    """Gathers and scatters of a step, in units of the modules that travel, and as whole numbers of parameters."""
    found = []
    for stage in (2, 3):
        ledger = CommunicationLedger()
        train = loader(3 * BATCH, BATCH, 2)
        trainer = fit(Deep(), train, hybrid(1, microbatches=1, zero_stage=stage), callbacks=[ledger])
        calls = {}
        for row, traffic in ledger.last.items():
            if row.axis == "data" and row.dtype == "float64":
                calls[row.collective] = calls.get(row.collective, 0) + traffic.calls
        modules = len(trainer.strategy.assembly.engine.data.modules)
        found.append({name: number / modules for name, number in calls.items()})
    return found


def test_a_unit_of_several_blocks_travels_in_one_message():
    second, third = run_trainers(2, messages)[0]
    assert second == {"all_gather": 1, "all_to_all": 1}
    assert third == {"all_gather": 2, "all_to_all": 1}
