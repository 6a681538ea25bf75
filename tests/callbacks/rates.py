"""A model whose rates have two groups and a schedule, with what its steps had and what came of them."""

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint

from lightning_hybrid.callbacks.rate_factors import RateFactors
from lightning_hybrid.optim import Lars
from tests.small import Small, loader, trainer_of, weights

KINDS = {
    "SGD": lambda groups: torch.optim.SGD(groups, 0.02, momentum=0.9),
    "AdamW": lambda groups: torch.optim.AdamW(groups, 0.02),
    "Lars": lambda groups: Lars(groups, 0.02, weight_decay=0.01, trust_coefficient=0.1),
}
BATCHES, BATCH = 6, 4


class Net(Small):
    depth = 2

    def __init__(self, kind="SGD"):
        super().__init__()
        self.kind = kind

    def configure_optimizers(self):
        groups = [{"params": [*self.inlet.parameters(), *self.blocks.parameters()]}]
        optimizer = KINDS[self.kind]([*groups, {"params": self.outlet.parameters(), "lr": 0.04}])
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Rates(Callback):
    """The rates of each applied step."""

    def __init__(self):
        self.effective, self.steps = [], 0

    def on_train_start(self, trainer, *args):
        self.steps = RateFactors.of(trainer.optimizers[0]).steps

    def on_train_batch_end(self, trainer, *args):
        factors = RateFactors.of(trainer.optimizers[0])
        if factors.steps > self.steps:
            self.effective.append(factors.effective_rates)
        self.steps = factors.steps


class Saving(Checkpoint):
    """Saves after each epoch, where `ModelCheckpoint` does, and has no state that a resumed run would miss."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_epoch_end(self, trainer, *args):
        trainer.save_checkpoint(self.folder / f"epoch={trainer.current_epoch}.ckpt")


def fitted(module, callbacks, strategy="auto", data=1, batch=BATCH, resume=None, save=None, **options):
    """A fit of an epoch or more; the rates of its steps, and the weights at its end.

    Args:
        save: Folder of checkpoints after each epoch, `epoch=0.ckpt` the first.
    """
    seen, keep = Rates(), []
    if save is not None:
        keep, options["enable_checkpointing"] = [Saving(save)], True
    trainer = trainer_of(strategy, callbacks=[*callbacks, seen, *keep], **options)
    trainer.fit(module, loader(BATCHES * BATCH, batch, data), ckpt_path=resume)
    return seen.effective, dict(weights(trainer))
