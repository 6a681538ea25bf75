"""Reports about other systems, by their number in the list of cases: tied weights, accumulation, batches, schedules."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_hybrid.parallel.gradients import local
from tests.launch import run_trainers
from tests.small import LAYOUTS, WIDTH, Small, Watch, assert_same, check_exact, fit, hybrid, loader, samples, weights


class Tied(Small):
    """The head multiplies by the embedding's weights; the embedding is on the first stage and the head on the last."""

    def __init__(self):
        super().__init__()
        self.inlet = nn.Embedding(8, WIDTH).double()
        self.outlet = nn.Linear(WIDTH, 8, bias=False).double()
        self.outlet.weight = self.inlet.weight

    def loss(self, batch):
        tokens = batch[0].argsort(dim=1)
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


class Copies(Callback):
    """This rank's copy of the shared weights, or its shard of it, after each step; none where neither module is."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, *args):
        named = pl_module.named_parameters()
        self.seen.append([local(p.detach()).clone() for name, p in named if "let.weight" in name])


def tied(options, data=1):
    copies, strategy = Copies(), "auto" if options is None else hybrid(**options)
    trainer = fit(Tied(), loader(20, 4, data), strategy, callbacks=[copies], gradient_clip_val=0.05)
    return copies.seen, weights(trainer)


@pytest.mark.parametrize(
    ("options", "data"),
    [({}, 1), ({"pipeline": 4}, 1), ({"chunks": 2}, 1), ({"zero_stage": 0}, 2), ({}, 2), ({"zero_stage": 3}, 2)],
    ids=str,
)
def test_tied_weights_stay_equal_and_count_once(options, data):
    """Case 4: copies are equal to the bit after every step; clipped by a norm that counts them once."""
    outcomes = run_trainers(options.get("pipeline", 2) * data, tied, options, data)
    state, expected = outcomes[0][1], dict(tied(None)[1])
    torch.testing.assert_close(state, expected)
    assert {"inlet.weight", "outlet.weight"} <= set(state)
    Tied().load_state_dict(state, strict=True)
    parts = 1 if options.get("zero_stage") == 0 else data  # else each replica has a shard
    for part in range(parts):
        for copies in zip(*(seen for seen, _ in outcomes[part::parts]), strict=True):
            held = [copy for of_rank in copies for copy in of_rank]
            assert len(held) == 2 * data // parts
            assert all(torch.equal(copy, held[0]) for copy in held)


class PerToken(Small):
    """Sequences of different lengths, whose padding has no loss; the mean over all tokens of a window."""

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return x + self.outlet(x)

    def errors(self, batch):
        x, y = batch
        lengths = 1 + (x[:, 0].abs() * 100).long() % WIDTH
        valid = torch.arange(WIDTH) < lengths[:, None]
        return (self(x) - y).square() * valid, valid.sum(1)

    def training_step(self, batch, batch_idx):
        errors, lengths = self.errors(batch)
        return {"loss": errors.sum() / lengths.sum(), "loss_weight": lengths.sum()}


class PerSequence(PerToken):
    """The mean over sequences of their means over tokens."""

    def training_step(self, batch, batch_idx):
        errors, lengths = self.errors(batch)
        return (errors.sum(1) / lengths).mean()


def batches(sizes, seed=0):
    """Batches of the given sizes, in order."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    chosen = [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
    return DataLoader(samples(sum(sizes), seed), batch_sampler=chosen)


WINDOWS = [(PerToken, 4, 4), (PerToken, 8, 2), (PerToken, 16, 1), (PerSequence, 4, 1), (PerSequence, 4, 4)]
"""Model, batch size and batches of a window: with the first three, 16 and then 8 samples."""


def accumulated(layout):
    pipeline, data, chunks = layout or (1, 1, 1)
    states = []
    for model, batch, accumulate in WINDOWS:
        strategy = hybrid(pipeline, chunks) if layout else "auto"
        trainer = fit(model(), loader(24, batch, data), strategy, accumulate_grad_batches=accumulate)
        states.append(weights(trainer))
    return states


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_accumulated_gradients_are_those_of_one_big_batch(layout):
    """Case 11: with `loss_weight` a window is the mean over its tokens, also the last one, which is shorter.

    Without it samples count alike, and Lightning divides the last window by its full number of batches.
    """
    found = run_trainers(layout[0] * layout[1], accumulated, layout)[0]
    one_big_batch = dict(weights(fit(PerToken(), batches([16, 8]))))
    for state in found[:3]:
        torch.testing.assert_close(state, one_big_batch)
    for state, expected in zip(found[3:], accumulated(None)[3:], strict=True):
        torch.testing.assert_close(state, dict(expected))


class Logging(Small):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class Validating(Logging):
    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("val_loss", loss)
        return loss


ODD = [[8], [4, 4, 2], [1, 8, 2, 3, 8]]


def odd_batches(options):
    """Training on batches of these sizes, and validation after each of them."""
    outcomes = []
    for sizes in ODD:
        watch, strategy = Watch(), "auto" if options is None else hybrid(**options)
        limits = {"val_check_interval": 1, "max_epochs": 2, "log_every_n_steps": 1}
        val = batches(sizes[::-1], seed=1)
        trainer = fit(Validating(), batches(sizes), strategy, val, callbacks=[watch], **limits)
        outcomes.append((watch.seen, weights(trainer)))
    return outcomes


@pytest.mark.parametrize(
    "options",
    [
        {"microbatches": 3},
        {"microbatches": 9},
        {"microbatches": 4, "schedule": "gpipe"},
        {"microbatches": 4, "chunks": 2},
    ],
    ids=str,
)
def test_batch_that_no_number_of_microbatches_divides(options):
    """Case 12: also batches smaller than the number of micro-batches, and whole ones after them."""
    expected = odd_batches(None)
    for rank, outcomes in enumerate(run_trainers(2, odd_batches, options)):
        for (seen, state), (seen_by_one, state_of_one) in zip(outcomes, expected, strict=True):
            assert_same(seen, seen_by_one)
            torch.testing.assert_close(state, dict(state_of_one) if rank == 0 else {})


UNEVEN = [[1, 5], [4, 2], [3, 3], [2, 7], [1, 1]]  # samples of either replica, step by step


class Given(Dataset):
    """Each item is a batch of the given size."""

    def __init__(self, sizes):
        self.parts = list(zip(*(tensor.split(sizes) for tensor in samples(sum(sizes)).tensors), strict=True))

    def __len__(self):
        return len(self.parts)

    def __getitem__(self, index):
        return self.parts[index]


def uneven_replicas(options):
    train, strategy = Given([size for step in UNEVEN for size in step]), hybrid(microbatches=4, **options)
    mine = range(dist.get_rank() % 2, len(train), 2)
    return weights(fit(Small(), DataLoader(train, None, sampler=mine), strategy, use_distributed_sampler=False))


@pytest.mark.parametrize("options", [{}, {"chunks": 2}, {"zero_stage": 0}, {"pipeline": 1}], ids=str)
def test_replicas_whose_batches_differ_in_size(options):
    """Case 12: they run different numbers of micro-batches, and meet new shapes at different steps."""
    found = run_trainers(2 * options.get("pipeline", 2), uneven_replicas, options)[0]
    expected = fit(Small(), DataLoader(Given([sum(step) for step in UNEVEN]), None))
    torch.testing.assert_close(found, dict(weights(expected)))


def very_different(options):
    """Two steps on batches whose four micro-batches have losses of very different sizes."""
    x, y = samples(8).tensors
    train = DataLoader(TensorDataset(x, y * torch.tensor([1.0, 10, 100, 1000]).repeat_interleave(2)[:, None]), 8)
    watch, strategy = Watch(), "auto" if options is None else hybrid(microbatches=4, **options)
    limits = {"gradient_clip_val": 1.0, "max_epochs": 2, "log_every_n_steps": 1}
    trainer = fit(Logging(), train, strategy, callbacks=[watch], **limits)
    return watch.seen, weights(trainer)


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "gpipe"},
        {"schedule": "1f1b"},
        {"schedule": "gpipe", "chunks": 2},
        {"schedule": "interleaved_1f1b", "chunks": 2},
    ],
    ids=str,
)
def test_every_microbatch_has_its_own_loss(options):
    """Case 37: what is reported is the mean of all four, and what is trained too."""
    seen, expected = very_different(None)
    outcomes = run_trainers(2, very_different, options)
    for found, _ in outcomes:
        assert_same(found, seen)
    torch.testing.assert_close(outcomes[0][1], dict(expected))


class ClipsItself(Small):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class ClipsByHand(Small):
    def on_before_optimizer_step(self, optimizer):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_module_that_overrides_clipping_clips_by_the_whole_models_norm(layout):
    """Case 34."""
    pipeline, data, chunks = layout
    check_exact(ClipsItself, pipeline * data, pipeline=pipeline, chunks=chunks)


def clipped_by_hand(options, data):
    with pytest.warns(UserWarning, match="on_before_optimizer_step takes a norm.*rank alone"):
        fit(ClipsByHand(), loader(8, 4, data), hybrid(**options))


@pytest.mark.parametrize(("options", "data"), [({}, 1), ({"pipeline": 1}, 2)], ids=str)
def test_a_norm_taken_by_hand_is_warned_of(options, data):
    """Case 34."""
    run_trainers(2, clipped_by_hand, options, data)
