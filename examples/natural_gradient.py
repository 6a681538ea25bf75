"""Steps that natural gradients save, and what they cost: `python -m examples.natural_gradient`.

First a small network learns least squares on inputs of which some directions are a hundred times shorter than others.
Then a residual network learns scikit-learn's digits with a batch of 1,024. SGD, AdamW and SGD with `KFACPreconditioner`
are each tried with a grid of the same size; what needs the fewest steps counts. Printed is what was measured, whichever
is better. `--help` lists the options.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from itertools import product
from math import isfinite, log10
from statistics import mean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader

from examples.digits import Digits, DigitsNet, parts
from examples.large_batch import prepare, show, show_progress, workers
from lightning_hybrid.callbacks import KFACPreconditioner

BATCH, EPOCHS = 1024, 80  # of the digits: 100 steps
ENOUGH = {"least squares": 0.01, "digits": 0.97}  # part of the first loss; share of images told right
LIMIT = 1000  # steps of least squares


class Way(NamedTuple):
    """A way of training, of an optimizer and two of its numbers.

    Attributes:
        arm: Name of it.
        rate: Learning rate.
        other: Momentum of SGD, damping of K-FAC, weight decay of AdamW.
    """

    arm: str
    rate: float
    other: float


class Run(NamedTuple):
    """One training."""

    problem: str
    way: Way
    seed: int


class Result(NamedTuple):
    """Steps and seconds until a training was good enough; infinite if it never was."""

    steps: float
    seconds: float


GRIDS: dict[str, list[Way]] = {
    "least squares": [
        *(Way("SGD", *each) for each in product((0.01, 0.02, 0.05, 0.1, 0.2), (0.0, 0.9, 0.99))),
        *(Way("AdamW", *each) for each in product((0.003, 0.01, 0.03, 0.1, 0.3), (0.0, 0.01, 0.1))),
        *(Way("K-FAC", *each) for each in product((0.1, 0.3, 1.0), (1e-4, 3e-4, 1e-3, 1e-2, 1e-1))),
    ],
    "digits": [
        *(Way("SGD", rate, 0.9) for rate in (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)),
        *(Way("AdamW", rate, 0.01) for rate in (0.003, 0.006, 0.012, 0.025, 0.05, 0.1)),
        *(Way("K-FAC", *each) for each in product((0.1, 0.3), (1e-3, 3e-3, 1e-2))),
    ],
}


def optimizer(run: Run, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """K-FAC is SGD's, whose gradients its callback changes."""
    way, is_digits = run.way, run.problem == "digits"
    if way.arm == "AdamW":
        return AdamW(parameters, way.rate, weight_decay=way.other)
    momentum = way.other if way.arm == "SGD" else 0.9 if is_digits else 0.0
    return SGD(parameters, way.rate, momentum, nesterov=is_digits, weight_decay=5e-4 if is_digits else 0.0)


def preconditioner(run: Run) -> list[Callback]:
    """The callback; the exact Fisher matrix of least squares is that of labels which the model draws."""
    if run.way.arm != "K-FAC":
        return []
    if run.problem == "digits":
        return [KFACPreconditioner(run.way.other, factor_every=1, inverse_every=2, kl_clip=0.01)]
    return [KFACPreconditioner(run.way.other, factor_every=1, inverse_every=1, kl_clip=None, fisher="mc")]


def least_squares(size: int = 256, width: int = 16, spread: float = 100.0) -> tuple[Tensor, Tensor]:
    """Inputs ``[size, width]`` whose longest direction is `spread` times the shortest, and labels that need all."""
    generator = torch.Generator().manual_seed(0)
    white, turn, map_ = (torch.randn(n, m, generator=generator) for n, m in ((size, width), (width, width), (width, 4)))
    inputs = white * torch.logspace(0, -log10(spread), width) @ torch.linalg.qr(turn)[0]
    return inputs.double(), (white @ map_).double() / width**0.5


class LeastSquares(LightningModule):
    """Two layers; each step has all samples.

    Attributes:
        losses: Of all steps.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).double()
        self.run, self.losses = run, list[float]()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        loss = F.mse_loss(self.layers(inputs), labels, reduction="sum") / len(inputs)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Optimizer:
        return optimizer(self.run, self.parameters())


class Net(DigitsNet):
    """The network of the digits with the optimizer of a run."""

    def __init__(self, run: Run) -> None:
        super().__init__(batch_size=BATCH)
        self.run = run

    def configure_optimizers(self) -> Optimizer:
        return optimizer(self.run, self.parameters())


class Watch(Callback):
    """Ends a run when it is good enough, and keeps how good it was after each step, and its time without looking.

    Args:
        look: Gives a value that is to reach 1.
    """

    def __init__(self, look: Callable[[Any], float]) -> None:
        self.look, self.seconds, self.values = look, list[float](), list[float]()
        self.since = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The clock runs."""
        self.since = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """It stops while we look."""
        before = self.seconds[-1] if self.seconds else 0.0
        self.seconds.append(before + time.perf_counter() - self.since)
        self.values.append(self.look(pl_module))
        trainer.should_stop = self.is_enough or not isfinite(self.values[-1])
        self.since = time.perf_counter()

    @property
    def is_enough(self) -> bool:
        """Whether the last step was good enough."""
        return self.values[-1] >= 1


def look_at_loss(module: LeastSquares) -> float:
    ratio = module.losses[-1] / module.losses[0]
    return ENOUGH["least squares"] / ratio if ratio < 1e6 else float("nan")


def look_at_digits(module: Net) -> float:
    held_out = [part for name, part in parts().items() if name != "train"]
    images, classes = (torch.cat([getattr(part, name) for part in held_out]) for name in ("images", "classes"))
    module.eval()
    with torch.no_grad():
        share = (module(images).argmax(1) == classes).double().mean()
    module.train()
    return float(share) / ENOUGH["digits"]


def train(run: Run, max_steps: int = LIMIT) -> tuple[Watch, LightningModule]:
    """Train once, until it is enough."""
    seed_everything(run.seed, verbose=False)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    is_digits = run.problem == "digits"
    watch: Watch = Watch(look_at_digits if is_digits else look_at_loss)
    module = Net(run) if is_digits else LeastSquares(run)
    options: dict[str, Any] = {"limit_val_batches": 0, "num_sanity_val_steps": 0, **quiet}
    trainer = Trainer(accelerator="cpu", max_epochs=1, callbacks=[watch, *preconditioner(run)], **options)
    with redirect_stdout(StringIO()):  # the layers' table
        if is_digits:
            trainer.fit(module, Digits(BATCH, EPOCHS, run.seed))
        else:
            trainer.fit(module, DataLoader([least_squares()] * max_steps, batch_size=None))
    return watch, module


def measure(run: Run) -> Result:
    """Train once, and say how long it took."""
    watch, _ = train(run)
    return Result(len(watch.values), watch.seconds[-1]) if watch.is_enough else Result(float("inf"), float("inf"))


def best(results: Mapping[Run, Result], arm: str) -> tuple[Way, list[Result]]:
    """The way with the fewest steps, and what it came to, seed by seed."""
    ways: dict[Way, list[Result]] = {}
    for run, result in results.items():
        if run.way.arm == arm:
            ways.setdefault(run.way, []).append(result)
    return min(ways.items(), key=lambda found: mean(result.steps for result in found[1]))


def main(problems: Sequence[str] = tuple(ENOUGH), num_seeds: int = 3, num_workers: int = 0) -> dict[str, Any]:
    """Train all, and print a table for each problem.

    Args:
        problems: Names of `GRIDS`.
        num_seeds: Trainings of each way.
        num_workers: Processes that train at the same time; 0: this one.

    Returns:
        Means of the steps by problem and arm.
    """
    found: dict[str, Any] = {}
    for problem in problems:
        runs = [Run(problem, way, seed) for way in GRIDS[problem] for seed in range(num_seeds)]
        results: dict[Run, Result] = {}
        with workers(num_workers) as each:
            for run, result in zip(runs, each(measure, runs), strict=False):
                results[run] = result
                show_progress(f"{problem}: {len(results)} of {len(runs)} trainings")
        enough = (
            f"{ENOUGH[problem]:.0%} of the first loss" if problem != "digits" else f"{ENOUGH[problem]:.0%} told right"
        )
        show(f"\n{problem}, to {enough}; {num_seeds} seeds")
        show(f"{'':8}{'rate, other':>14}{'steps':>16}{'mean':>8}{'seconds':>9}")
        found[problem] = {}
        for arm in dict.fromkeys(way.arm for way in GRIDS[problem]):
            way, of_seeds = best(results, arm)
            steps = ", ".join(f"{result.steps:g}" for result in of_seeds)
            found[problem][arm] = mean(result.steps for result in of_seeds)
            seconds = mean(result.seconds for result in of_seeds)
            chosen = f"{way.rate:g}, {way.other:g}"
            show(f"{arm:8}{chosen:>14}{steps:>16}{found[problem][arm]:>8.4g}{seconds:>9.2f}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", nargs="+", choices=GRIDS, default=list(GRIDS), help="(default: all)")
    parser.add_argument("--seeds", type=int, default=3, dest="num_seeds", help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), dest="num_workers", help="trainings at a time")
    options = vars(parser.parse_args())
    if options["num_seeds"] < 1:
        parser.error(f"--seeds {options['num_seeds']} must be at least 1")
    prepare()
    main(**options)
