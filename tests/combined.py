"""Runs with callbacks for large batches, of which any may be together, in one process and in layouts."""

from itertools import combinations
from typing import NamedTuple

import torch
from lightning.pytorch import Callback
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

from lightning_hybrid.callbacks import (
    GradientNoise,
    LearningRateScaling,
    LearningRateWarmup,
    OptimizerRestart,
    WeightDecayRules,
)
from tests.small import Small, hybrid, loader, trainer_of, weights
from tests.test_resuming import Stateful

SAMPLES, BATCH, EPOCHS = 32, 8, 2  # the first epoch ends within the second cycle, the warm-up and the one after it
MAKE = {
    "scaling": lambda: LearningRateScaling(2, rule="sqrt"),
    "warmup": lambda: LearningRateWarmup(steps=5, start_factor=0.1),
    "restart": lambda: OptimizerRestart(rewarm=3),
    "noise": lambda: GradientNoise(eta=0.1, gamma=0.55, seed=5),
    "rules": lambda: WeightDecayRules({"*bias": 0, "outlet": 2.0}),
}
SETS = [*combinations(MAKE, 2), tuple(MAKE)]


class Layout(NamedTuple):
    """One process, if nothing else is said."""

    strategy: str = "auto"
    pipeline: int = 1
    data: int = 1
    zero: int = 0

    @property
    def size(self):
        return self.pipeline * self.data

    def make(self):
        return hybrid(self.pipeline, zero_stage=self.zero) if self.strategy == "hybrid" else self.strategy


LAYOUTS = {
    "ddp": Layout("ddp", data=2),
    "zero3": Layout("hybrid", data=2, zero=3),
    "pipeline": Layout("hybrid", pipeline=2, data=2, zero=1),
}


class Cyclic(Small):
    """With a schedule that begins anew after three steps."""

    depth, rate = 4, 0.01

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), self.rate, weight_decay=0.1)
        scheduler = CosineAnnealingWarmRestarts(optimizer, 3, T_mult=2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Saving(Callback):
    """Saves a checkpoint in the middle of an epoch, of the second cycle and of both warm-ups."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 3:
            trainer.save_checkpoint(self.path)


def fitted(layout, names, train, *others, resume=None, **options):
    """The weights after a run with some callbacks."""
    callbacks = [*(MAKE[name]() for name in names), *others]
    trainer = trainer_of(layout.make(), callbacks=callbacks, gradient_clip_val=0.5, **options)
    trainer.fit(Cyclic(), train, ckpt_path=resume)
    return weights(trainer)


def train_all(layout, sets):
    return [fitted(layout, names, loader(SAMPLES, BATCH, layout.data), max_epochs=EPOCHS) for names in sets]


def save_all(layout, folder):
    """With all callbacks, from a loader that knows where it is."""
    return _in_one_epoch(layout, Saving(folder / "middle.ckpt"))


def go_on_all(layout, folder):
    return _in_one_epoch(layout, resume=folder / "middle.ckpt")


def _in_one_epoch(layout, *others, **options):
    train = Stateful(loader(EPOCHS * SAMPLES, BATCH, layout.data))
    return fitted(layout, MAKE, train, *others, use_distributed_sampler=False, **options)
