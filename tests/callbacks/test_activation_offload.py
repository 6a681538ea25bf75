"""Activation offload under Lightning: numbers of every strategy bit for bit, plans under budgets, refusals."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from examples.gpt import GPT, Block
from lightning_hybrid.callbacks import ActivationOffload, MemoryLedger
from lightning_hybrid.compat import outer_hooks
from tests.callbacks.test_communication_ledger import Failing
from tests.launch import run_trainers
from tests.small import Small, fit, hybrid, loader, trainer_of, weights

CONTEXT = 8


class Dropping(Block):
    def feed_forward(self, x):
        return F.dropout(super().feed_forward(x), 0.3, self.training)


class Checkpointing(Dropping):
    def feed_forward(self, x):
        return checkpoint(super().feed_forward, x, use_reentrant=False)


class Dropout(GPT):
    """The example's model with dropout, in one block of two within an activation checkpoint."""

    validation_step = LightningModule.validation_step

    def __init__(self):
        torch.manual_seed(1)
        super().__init__(width=16, depth=4, heads=2, context=CONTEXT)
        self.blocks = nn.ModuleList((Dropping, Checkpointing)[i % 2](16, 2) for i in range(4))


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu_(x + self.norm2(self.conv2(y)))


class ResNet(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.layers = nn.Sequential(*(Residual(8) for _ in range(3)))
        self.head = nn.Linear(8, 4)

    def training_step(self, batch, batch_idx):
        x = self.layers(self.stem(batch))
        return self.head(x.mean((2, 3))).logsumexp(1).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def texts(replica=0, replicas=1):
    generator = torch.Generator().manual_seed(2)
    data = torch.randint(0, 256, (16, CONTEXT + 1), generator=generator)
    return DataLoader(data.tensor_split(replicas)[replica], 8 // replicas)


def images():
    return DataLoader(torch.rand(8, 3, 8, 8, generator=torch.Generator().manual_seed(2)), 4)


DATA = {Dropout: texts, ResNet: images}


def trained(make, callbacks=(), strategy="auto", data=None, **options):
    module = make()
    torch.manual_seed(5)
    trainer = fit(module, data or DATA[make](), strategy, callbacks=list(callbacks), **options)
    return weights(trainer)


def same(found, expected):
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(("make", "policies"), [(Dropout, ("all", "blocks")), (ResNet, ("all", "blocks", "conv"))])
def test_one_process_trains_bit_for_bit(make, policies):
    expected = trained(make)
    for policy in policies:
        offload = ActivationOffload(policy, min_bytes=0)
        assert same(trained(make, [offload]), expected)
        assert sum(offload.sizes.values()) > 0
    ledgers = [MemoryLedger(), MemoryLedger()]
    before, after = ActivationOffload(min_bytes=0), ActivationOffload(min_bytes=0)
    assert same(trained(make, [ledgers[0], before]), expected)
    assert same(trained(make, [after, ledgers[1]]), expected)
    plain = MemoryLedger()
    trained(make, [plain])
    assert before.sizes == after.sizes
    inside, outside, whole = (ledger.peak.totals() for ledger in (*ledgers, plain))
    assert inside == outside
    assert inside["activations"] < whole["activations"]
    if make is ResNet:  # nothing is recomputed: all of it moves, and two groups in a row are here at once
        assert inside["offloaded"] == whole["activations"]
        assert inside["activations"] <= max(sum(pair) for pair in itertools.pairwise(before.sizes.values()))


LAYOUTS = {
    "pipeline 2": lambda: hybrid(2, microbatches=4, schedule="1f1b", partition=[2, 2]),
    "2 chunks": lambda: hybrid(2, 2, microbatches=2),
    "zero 3": lambda: hybrid(1, microbatches=2, zero_stage=3),
    "tensor 2": lambda: hybrid(1, microbatches=1, tensor_parallel_size=2),
    "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
}


def layouts():
    """For each, whether weights are those of a fit without the callback, and what moved."""
    rank, found = torch.distributed.get_rank(), {}
    for name, strategy in LAYOUTS.items():
        data = texts(rank, 2) if name in ("zero 3", "ddp") else texts()
        expected = trained(Dropout, strategy=strategy(), data=data, use_distributed_sampler=False)
        offload, ledger = ActivationOffload(min_bytes=0), MemoryLedger()
        result = trained(Dropout, [offload, ledger], strategy=strategy(), data=data, use_distributed_sampler=False)
        found[name] = same(result, expected), offload.sizes, ledger.last
    return found


def budgets():
    """A budget that every rank can keep, with the plan; one that only the rank with more blocks cannot."""

    def options():
        return {"strategy": hybrid(2, microbatches=2, partition=[1, 3]), "data": texts()}

    offload = ActivationOffload(min_bytes=0, budget_bytes=60_000)
    equal = same(trained(Dropout, [offload], **options()), trained(Dropout, **options()))
    with pytest.raises(ValueError, match="budget_bytes=") as caught:
        trained(Dropout, [ActivationOffload(min_bytes=0, budget_bytes=20_000)], **options())
    return equal, offload.plan, offload.sizes, str(caught.value)


def two_ranks():
    return layouts(), budgets()


@pytest.fixture(scope="module")
def results():
    return run_trainers(2, two_ranks)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_bit_for_bit(name, results):
    for found, _ in results:
        equal, sizes, last = found[name]
        assert equal
        assert 0 < sum(last.activations.values()) < sum(last.offloaded.values())
        blocks = [group for group in sizes if group.startswith("blocks.")]
        assert len(blocks) == (4 if name in ("zero 3", "tensor 2", "ddp") else 2)


def test_each_rank_has_a_plan_and_a_budget_too_small_for_one_ends_all(results, capsys):
    (_, first), (_, second) = results
    for equal, plan, sizes, error in (first, second):
        assert equal
        assert plan.keys() == sizes.keys()
        assert set(plan.values()) == {False, True}
        assert error.startswith("Rank 0: ActivationOffload: budget_bytes=20000")
        assert "Allow 36160 or more" in error
    assert list(first[1]) == ["(before blocks)", "blocks.0"]
    assert list(second[1]) == ["blocks.1", "blocks.2", "blocks.3", "(after blocks.3)"]


class NoBlocks(LightningModule):
    def __init__(self):
        super().__init__()
        self.inlet, self.outlet = nn.Linear(4, 4), nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.outlet(self.inlet(batch).tanh()).exp().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_children_take_the_place_of_blocks():
    offload = ActivationOffload(min_bytes=0)
    fit(NoBlocks(), DataLoader(torch.rand(4, 4), 2), callbacks=[offload])
    assert list(offload.sizes) == ["inlet", "(after inlet)", "outlet", "(after outlet)"]


def test_what_cannot_work_is_refused_before_training():
    data = DataLoader(torch.rand(4, 4), 2)
    for callbacks, pattern in (
        ([ActivationOffload("blocks")], r"NoBlocks has no list of blocks. Name lists by blocks=\[...\]"),
        ([ActivationOffload("conv")], "NoBlocks has no convolution"),
        ([ActivationOffload(), ActivationOffload()], "2 ActivationOffloads"),
    ):
        module = NoBlocks()
        before = module.inlet.weight.detach().clone()
        with pytest.raises(ValueError, match=pattern):
            fit(module, data, callbacks=callbacks)
        assert torch.equal(module.inlet.weight, before)
    with pytest.raises(ValueError, match="policy='half' is none of"):
        ActivationOffload("half")
    for argument, value in itertools.product(("min_bytes", "budget_bytes"), (-1, "1MiB", 0.5)):
        with pytest.raises(ValueError, match=f"{argument}={value!r} must be a whole number of bytes of at least 0"):
            ActivationOffload(**{argument: value})


def test_a_first_batch_that_moves_nothing_is_told_once():
    offload = ActivationOffload()
    with pytest.warns(UserWarning, match="moves nothing: .*min_bytes=1048576 or more") as caught:
        fit(NoBlocks(), DataLoader(torch.rand(4, 4), 2), callbacks=[offload])
    assert sum("moves nothing" in str(warning.message) for warning in caught) == 1
    assert offload.sizes == {}


class Skipping(Small):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 1 else None


@pytest.mark.parametrize("module", [Failing, Skipping])
def test_an_early_end_leaves_neither_hooks_nor_layers(module):
    model = module()
    try:
        trainer_of(callbacks=[ActivationOffload(min_bytes=0)]).fit(model, loader(12, 4))
    except ArithmeticError:
        assert module is Failing
    assert outer_hooks() is None
    assert not any("forward" in vars(part) for part in model.modules())
