"""Fits over samples that are numbers, with checkpoints after each batch, and what each rank was trained on."""

import itertools
import warnings
from typing import NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import nn
from torch.utils.data import (
    DataLoader,
)

from tests.small import hybrid, trainer_of

SIZES = (1, 2, 4)
EPOCHS = 2


class Numbers(LightningModule):
    """Samples are numbers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1).double()

    def training_step(self, batch, batch_idx):
        parts = (
            [part for part in batch.values() if part is not None]
            if isinstance(batch, dict)
            else [torch.as_tensor(batch)]
        )
        return sum(self.linear(part.view(-1, 1).double()).square().mean() for part in parts) * 1e-9

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
    "shuffled": Kind(shuffle=True),
    "ordered-odd": Kind(length=29, workers=2),
    "shuffled-odd": Kind(length=29, shuffle=True),
    "shuffled-dropping": Kind(length=27, shuffle=True, drop_last=True, seed=None),
    "shuffled-workers": Kind(shuffle=True, workers=2),
    "shuffled-own": Kind(shuffle=True, own=True),
    "windows": Kind(length=48, shuffle=True, accumulate=2),
}


class Seen(Callback):
    """What each rank is given; a module over stages is called on parts of it."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        parts = batch if isinstance(batch, dict) else {"": torch.as_tensor(batch)}
        lists = {name: part.tolist() for name, part in parts.items() if part is not None}
        self.seen.append((trainer.current_epoch, batch_idx, lists))


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


def fit(loader, seed=5, path=None, saving=None, pipeline=1, val=None, model=Numbers, callbacks=(), **options):
    """On a rank: what it was trained on, and the warnings of loaders that cannot go on."""
    seed_everything(seed, workers=True, verbose=False) if seed is not None else torch.manual_seed(7)
    strategy, seen = hybrid(pipeline, microbatches=1), Seen()
    callbacks = [*callbacks, seen, *([Saving(saving)] if saving else [])]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = trainer_of(strategy, max_epochs=EPOCHS, callbacks=callbacks, **options)
        trainer.fit(model(), loader, val, ckpt_path=path)
    return seen.seen, any("your dataloader is not resumable" in str(each.message) for each in caught)


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
