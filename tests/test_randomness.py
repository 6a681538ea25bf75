"""Random data, random masks and initial weights: what must agree between ranks agrees, and what must differ differs."""

import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import seed_everything
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.launch import run_trainers
from tests.small import WIDTH, Block, Small, Watch, fit, hybrid, samples, weights


class Oracle(Small):
    """Blocks are the identity and labels a function of the inputs: the loss is 0 unless the two were parted."""

    rate = 0.0

    def __init__(self):
        super().__init__()
        del self.inlet, self.outlet
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.sum(1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = (self(x) - y).square().mean()
        self.log("loss", loss, on_step=True)
        self.log("sum", y.sum(), on_step=True, reduce_fx="sum")
        return loss


class Validating(Oracle):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self(batch[0]) - batch[1]).square().mean())


def labelled(x):
    return x, x.sum()


class Augmented(Dataset):
    """Adds noise from all three generators that a dataset may use."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        noise = torch.randn(WIDTH) + random.random() + numpy.random.rand()
        return labelled(noise.double() + index)


class RandomStream(IterableDataset):
    def __iter__(self):
        for _ in range(12):
            yield labelled(torch.randn(WIDTH, dtype=torch.float64))


class VaryingLength(Dataset):
    """Batches of 2 to 5 samples."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        x = torch.randn(2 + torch.randint(4, ()).item(), WIDTH, dtype=torch.float64)
        return x, x.sum(1)


class OwnGenerator(RandomStream):
    """Draws from a generator that nobody else knows."""

    def __iter__(self):
        generator = numpy.random.default_rng()
        for _ in range(12):
            yield labelled(torch.from_numpy(generator.standard_normal(WIDTH)))


class Fixed(Augmented):
    def __getitem__(self, index):
        return labelled(torch.arange(WIDTH).double() * index)


LOADERS = {
    "shuffled": lambda shuffle: DataLoader(Fixed(), 4, shuffle=shuffle),
    "stream": lambda shuffle: DataLoader(RandomStream(), 4),
    "augmented": lambda shuffle: DataLoader(Augmented(), 4, shuffle=shuffle),
    "workers": lambda shuffle: DataLoader(Augmented(), 4, shuffle=shuffle, num_workers=2),
    "stream from workers": lambda shuffle: DataLoader(RandomStream(), 4, num_workers=2),
    "lengths": lambda shuffle: DataLoader(VaryingLength(), None, shuffle=shuffle),
}


def losses(kinds):
    """Each rank starts from numbers of its own, as processes do that nobody seeds."""
    found = {}
    for kind in kinds:
        own = torch.seed() % 2**32
        random.seed(own)
        numpy.random.seed(own)
        watch, make = Watch(), LOADERS[kind]
        options = {"use_distributed_sampler": False, "max_epochs": 2, "log_every_n_steps": 1}
        fit(Validating(), make(True), hybrid(), make(False), callbacks=[watch], **options)
        found[kind] = watch.seen
    return found


@pytest.mark.parametrize(("size", "kinds"), [(2, list(LOADERS)), (4, ["shuffled", "stream", "lengths"])], ids=str)
def test_inputs_and_labels_come_from_the_same_samples(size, kinds):
    """Case 9: without seed_everything and without a distributed sampler."""
    first, *others = run_trainers(size, losses, kinds)
    for kind, seen in first.items():
        values = [metrics for moment, metrics in seen if moment.startswith("train batch")]
        assert len(values) >= 6, kind
        assert all(metrics["callback_metrics loss"] < 1e-20 for metrics in values), kind
        assert seen[-1][1]["callback_metrics val_loss"] < 1e-20, kind
        assert len({metrics["callback_metrics sum"] for metrics in values}) > 2, kind
        assert all(other[kind] == seen for other in others), kind


def refused():
    with pytest.raises(RuntimeError) as caught:
        fit(Oracle(), DataLoader(OwnGenerator(), 4), hybrid())
    return str(caught.value)


def test_batches_that_differ_between_stages_are_refused_on_every_rank():
    """Case 9: a generator of its own in the dataset is out of reach."""
    for message in run_trainers(2, refused):
        assert "The ranks [0, 1] of one model replica were given different batches" in message
        assert "seed_everything" in message


class MaskedOracle(Oracle):
    """Draws a mask in the step: the inputs and the labels of one sample must be masked alike on all stages."""

    def training_step(self, batch, batch_idx):
        x = batch[0] * (torch.rand_like(batch[0]) > 0.5) + random.random() + numpy.random.rand()
        loss = (self(x) - x.sum(1)).square().mean()
        self.log("loss", loss)
        self.log("sum", x.sum(), reduce_fx="sum")
        return loss


MASKS = {}


class Dropping(Block):
    def forward(self, x):
        mask = F.dropout(torch.ones(1, 32), 0.5, self.training) > 0
        MASKS.setdefault(self.number, []).append("".join(map(str, mask[0].int().tolist())))
        return super().forward(F.dropout(x, 0.1, self.training))


class WithDropout(Small):
    block = Dropping

    def __init__(self):
        super().__init__()
        for number, block in enumerate(self.blocks):
            block.number = number

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


def masked(layout):
    pipeline, _, chunks = layout
    seed_everything(1)
    MASKS.clear()
    watch = Watch()
    fit(MaskedOracle(), DataLoader(Fixed(), 4), hybrid(pipeline, chunks), callbacks=[watch], log_every_n_steps=1)
    trainer = fit(WithDropout(), DataLoader(samples(8), 2), hybrid(pipeline, chunks))
    return watch.seen, dict(MASKS), weights(trainer)


def test_masks_agree_over_stages_and_differ_between_blocks_replicas_microbatches_and_steps():
    """Case 41: the numbers of a step are those of its step, micro-batch and replica; a second run repeats them."""
    first = run_trainers(4, masked, (2, 2, 1))
    for seen, _, _ in first:
        assert all(metrics["callback_metrics loss"] < 1e-20 for moment, metrics in seen if "batch" in moment)
    drawn = {}  # by data rank
    for rank, (_, masks, _) in enumerate(first):
        drawn.setdefault(rank % 2, []).extend((number, mask) for number, of in masks.items() for mask in set(of))
    assert {number for number, _ in drawn[0]} == set(range(6))
    every = [mask for of_replica in drawn.values() for _, mask in of_replica]
    assert len(set(every)) == len(every) >= 2 * 6 * 4
    again = run_trainers(4, masked, (2, 2, 1))
    for (_, masks, state), (_, masks_again, state_again) in zip(first, again, strict=True):
        assert masks == masks_again
        assert all(torch.equal(state[name], state_again[name]) for name in state)


class Seeded(Small):
    """Its weights come from the global stream, as in most models."""

    rate = 0.0

    def __init__(self):
        nn.Module.__init__(self)
        super(Small, self).__init__()
        self.inlet, self.outlet = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(self.depth))
        self.double()


def initial(layout, seed):
    if seed is None:
        torch.seed()
    else:
        seed_everything(seed)
    strategy = hybrid(layout[0], layout[2]) if layout else "auto"
    module = Seeded()
    own = module.inlet.weight.detach().clone()
    return own, weights(fit(module, DataLoader(samples(4), 2), strategy))


@pytest.mark.parametrize("layout", [(2, 1, 1), (2, 2, 1), (2, 1, 2)], ids=str)
def test_initial_weights_do_not_depend_on_the_layout(layout):
    """Case 41: and no two layers are alike."""
    expected = dict(initial(None, 1)[1])
    state = run_trainers(layout[0] * layout[1], initial, layout, 1)[0][1]
    torch.testing.assert_close(state, expected, rtol=0, atol=0)
    layers = [state[f"blocks.{number}.linear.weight"] for number in range(6)]
    assert not any(torch.equal(a, b) for i, a in enumerate(layers) for b in layers[:i])


def test_initial_weights_without_a_seed_are_those_of_the_first_rank():
    """Case 41."""
    outcomes = run_trainers(2, initial, (1, 2, 1), None)
    assert not torch.equal(outcomes[0][0], outcomes[1][0])
    assert torch.equal(outcomes[0][1]["inlet.weight"], outcomes[0][0])
