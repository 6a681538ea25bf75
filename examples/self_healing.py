"""A run that a broken image would end, and one that heals itself: `python -m examples.self_healing [FOLDER]`.

A small residual network learns scikit-learn's digits. One of its 1,280 images is broken: a pixel of it is no number,
and neither is any weight after the first step that sees it. With `DivergenceRollback` the run goes back before such a
step and leaves its batch out. It ends with the weights, to the bit, of a run that was never given these batches.
"""

import csv
import logging
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, default_convert

from examples.digits import Digits, DigitsNet, Images, Shuffled
from lightning_hybrid.callbacks import DivergenceRollback

BROKEN = 7  # number of the image
BATCH = 32
RUNS = ("without the batches of the broken image", "with them", "with them, and DivergenceRollback")
SHOWN = ("step", "batches", "back_to_step", "reason", "module", "action")


class BrokenDigits(Digits):
    """The digits with a broken image among them.

    Args:
        epochs: How often each image comes.
        left_out: Leave out the batches in which the broken one is.
    """

    def __init__(self, epochs: int, *, left_out: bool) -> None:
        super().__init__(BATCH, epochs)
        self.left_out = left_out

    def setup(self, stage: str) -> None:
        super().setup(stage)
        images, classes = self.parts["train"].images.clone(), self.parts["train"].classes
        images[BROKEN, 0, 4, 4] = torch.nan
        self.parts = self.parts | {"train": Images(images, classes)}

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        train = self.parts["train"]
        order = list(Shuffled(len(train), self.epochs, self.seed))
        batches = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
        kept = [batch for batch in batches if BROKEN not in batch or not self.left_out]
        return DataLoader(train, batch_sampler=kept, collate_fn=default_convert)


class Net(DigitsNet):
    """The network with its optimizer."""

    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters(), 3e-3)


class Outcome(NamedTuple):
    """Of one run: loss and accuracy on the test images, and weights."""

    loss: float
    accuracy: float
    weights: Mapping[str, Tensor]


def train(epochs: int, *callbacks: Callback, left_out: bool = False) -> Outcome:
    """Train once."""
    seed_everything(0, verbose=False)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", max_epochs=1, num_sanity_val_steps=0, callbacks=list(callbacks), **quiet)
    trainer.fit(Net(), BrokenDigits(epochs, left_out=left_out))
    loss, accuracy = (float(trainer.callback_metrics[f"test/{name}"]) for name in ("loss", "accuracy"))
    return Outcome(loss, accuracy, trainer.lightning_module.state_dict())


def main(folder: str = "self_healing", epochs: int = 4) -> tuple[dict[str, Outcome], DivergenceRollback]:
    """Train three times, and say what has happened; the file of what the last run did is in the folder."""
    audit = Path(folder, "divergence.csv")
    rollback = DivergenceRollback(snapshot_every=20, audit=str(audit))
    outcomes = dict(zip(RUNS, (train(epochs, left_out=True), train(epochs), train(epochs, rollback)), strict=True))
    for name, found in outcomes.items():
        print(f"{name:40}: loss {found.loss:.4f}, accuracy {found.accuracy:.1%}")
    expected, _, healed = (found.weights for found in outcomes.values())
    is_same = all(healed[name].equal(value) for name, value in expected.items())
    print(f"The last run's weights are {'' if is_same else 'not '}those of the first, to the bit.")
    print(f"It went back {rollback.rollbacks} times, as {audit} says:")
    with audit.open() as file:
        for row in list(csv.DictReader(file))[-rollback.rollbacks :]:
            print("; ".join(f"{name} {row[name]}" for name in SHOWN))
    return outcomes, rollback


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    main(*sys.argv[1:2])
