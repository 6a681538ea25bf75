"""A project that was written without this package, and what each of its callbacks adds in one line.

`python -m examples.existing_project` trains it as it was; with names behind it, such as `LearningRateWarmup`, with
those callbacks, and with `all` with all of them. `lightning-hybrid fit --config examples/existing_project.yaml` has the
same in a file.
"""

import argparse
from collections.abc import Callable

from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

from examples.digits import Digits, DigitsNet
from lightning_hybrid.callbacks import (
    BatchTimeProfile,
    GradientNoise,
    GradientNoiseScaleMonitor,
    LearningRateScaling,
    LearningRateWarmup,
    OptimizerRestart,
    UtilizationMonitor,
    WeightDecayRules,
)


class Project(DigitsNet):
    """The project's own model, with its own optimizer and schedule, whose rate was found with batches of 32."""

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = SGD(self.parameters(), 0.02, momentum=0.9, weight_decay=5e-4)
        scheduler = CosineAnnealingWarmRestarts(optimizer, T_0=10, T_mult=2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


LINES: dict[str, Callable[[], Callback]] = {
    "BatchTimeProfile": lambda: BatchTimeProfile(),
    "LearningRateScaling": lambda: LearningRateScaling(reference_batch_size=32),
    "LearningRateWarmup": lambda: LearningRateWarmup(epochs=1),
    "WeightDecayRules": lambda: WeightDecayRules({"*bias": 0, "BatchNorm2d": 0}),
    "OptimizerRestart": lambda: OptimizerRestart(),  # at the ends of the schedule's cycles
    "GradientNoiseScaleMonitor": lambda: GradientNoiseScaleMonitor(),
    "GradientNoise": lambda: GradientNoise(eta=1e-5),
    "UtilizationMonitor": lambda: UtilizationMonitor(),
}


def train(*names: str, epochs: int = 7, folder: str = "existing_project") -> Trainer:
    """Train the project with some of the callbacks.

    Args:
        names: Of `LINES`.
        epochs: How often each image comes.
        folder: Where logs and the checkpoint go.
    """
    seed_everything(0, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        default_root_dir=folder,
        callbacks=[LINES[name]() for name in names],
    )
    trainer.fit(Project(batch_size=128), Digits(batch_size=64, epochs=1))
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all, or some of {', '.join(LINES)} (default: none)")
    chosen = parser.parse_args().names
    unknown = sorted(set(chosen) - {*LINES, "all"})
    if unknown:
        parser.error(f"{', '.join(unknown)}: give all, or some of {', '.join(LINES)}")
    logged = train(*(LINES if "all" in chosen else chosen)).callback_metrics
    for key in sorted(logged):
        print(f"{key:<40} {float(logged[key]):.4g}")
