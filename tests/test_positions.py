"""In the middle of an epoch the data goes on at the next sample, in one order whatever the number of replicas."""

import itertools
import warnings
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import nn
from torch.utils.data import DataLoader

from tests.launch import run_trainers
from tests.small import hybrid, trainer_of

SIZES = (1, 2, 4)
EPOCHS = 2


class Numbers(LightningModule):
    """Notes which samples it is trained on."""

    def __init__(self):
        super().__init__()
        self.linear, self.seen = nn.Linear(1, 1).double(), []

    def training_step(self, batch, batch_idx):
        parts = batch if isinstance(batch, dict) else {"": batch}
        parts = {name: part for name, part in parts.items() if part is not None}
        self.seen.append((self.current_epoch, batch_idx, {name: part.tolist() for name, part in parts.items()}))
        return sum(self.linear(part[:, None].double()).square().mean() for part in parts.values()) * 1e-9

    def validation_step(self, batch, batch_idx):
        self.linear(batch[:, None].double())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-9)


class Kind(NamedTuple):
    """Data of an epoch and what is done with them; `batch` counts the samples of all replicas."""

    length: int = 32
    batch: int = 8
    shuffle: bool = False
    drop_last: bool = False
    workers: int = 0
    seed: int | None = 5
    accumulate: int = 1
    own: bool = False

    def loader(self, size):
        generator = torch.Generator().manual_seed(8) if self.own else None
        return DataLoader(
            range(self.length),
            self.batch // size,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            num_workers=self.workers,
            generator=generator,
        )


KINDS = {
    "ordered": Kind(),
    "ordered-odd": Kind(length=29, workers=2),
    "shuffled": Kind(shuffle=True),
    "shuffled-odd": Kind(length=29, shuffle=True),
    "shuffled-dropping": Kind(length=27, shuffle=True, drop_last=True, seed=None),
    "shuffled-workers": Kind(shuffle=True, workers=2),
    "shuffled-own": Kind(shuffle=True, own=True),
    "windows": Kind(length=48, shuffle=True, accumulate=2),
}


class Saving(Callback):
    """Saves after each batch of the first epoch, and at its end."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(f"{self.path}-{batch_idx + 1}.ckpt")

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(f"{self.path}-end.ckpt")


def fit(loader, seed=5, path=None, saving=None, pipeline=1, val=None, **options):
    """On a rank: what it was trained on, and the warnings of loaders that cannot go on."""
    seed_everything(seed, workers=True, verbose=False) if seed is not None else torch.manual_seed(7)
    module, strategy = Numbers(), hybrid(pipeline, microbatches=1)
    callbacks = [Saving(saving)] if saving else []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = trainer_of(strategy, max_epochs=EPOCHS, callbacks=callbacks, **options)
        trainer.fit(module, loader, val, ckpt_path=path)
    return module.seen, any("your dataloader is not resumable" in str(each.message) for each in caught)


def first_runs(folder):
    size = dist.get_world_size()
    return {
        name: fit(
            kind.loader(size), kind.seed, saving=folder / f"{name}-{size}", accumulate_grad_batches=kind.accumulate
        )
        for name, kind in KINDS.items()
    }


def resumed_runs(folder, pairs):
    size = dist.get_world_size()
    found = {}
    for name, saved, stop in pairs:
        kind, path = KINDS[name], folder / f"{name}-{saved}-{stop}.ckpt"
        found[name, saved, stop] = fit(kind.loader(size), kind.seed, path, accumulate_grad_batches=kind.accumulate)
    return found


def joined(ranks):
    """Per batch: epoch, number, and the samples of all replicas in the order from which they were dealt out."""
    batches = []
    for shares in zip(*ranks, strict=True):
        ((epoch, number),) = {share[:2] for share in shares}
        lists = [share[2][""] for share in shares]
        batches.append((epoch, number, [each for row in itertools.zip_longest(*lists) for each in row]))
    return batches


def trimmed(batches, kind):
    """Without the samples that stand in at the end of an epoch so that all replicas have equally many."""
    return [(epoch, number, batch[: kind.length - number * kind.batch]) for epoch, number, batch in batches]


STOPS = (1, 2, -1, "end")  # batches of the epoch, from its end if negative


def check(folder, chosen):
    """Run each kind under each data size, then under each from where each stopped, at the chosen of the stops."""
    whole, pairs = {}, {size: [] for size in SIZES}
    for size in SIZES:
        ranks = run_trainers(size, first_runs, folder)
        for name, kind in KINDS.items():
            whole[name, size] = trimmed(joined([rank[name][0] for rank in ranks]), kind)
    for size, (place, name), (other, saved) in itertools.product(SIZES, enumerate(KINDS), enumerate(SIZES)):
        number = len(whole[name, saved]) // EPOCHS
        stops = [number + stop if stop == -1 else stop for stop in STOPS]
        pairs[size] += [(name, saved, stops[which]) for which in chosen(place + other + SIZES.index(size))]
    for size in SIZES:
        ranks = run_trainers(size, resumed_runs, folder, pairs[size], timeout=300)
        for name, saved, stop in pairs[size]:
            expected, kind = whole[name, saved], KINDS[name]
            start = len(expected) // EPOCHS if stop == "end" else stop
            found = trimmed(joined([rank[name, saved, stop][0] for rank in ranks]), kind)
            assert found == expected[start:], (name, saved, stop, size)
            assert not any(rank[name, saved, stop][1] for rank in ranks), (name, saved, stop, size)


def test_every_data_size_goes_on_where_any_other_stopped(tmp_path):
    """Cases 18 and 32: at one of the stops for each kind and pair of sizes, in all following epochs too."""
    check(tmp_path, lambda number: [number % len(STOPS)])


@pytest.mark.full
def test_every_data_size_goes_on_from_every_stop(tmp_path):
    check(tmp_path, lambda number: range(len(STOPS)))
