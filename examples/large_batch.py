"""What a large batch costs each optimizer: `python -m examples.large_batch`.

A small residual network learns scikit-learn's digits for the same epochs with batches of 32 and of 1,024, in every way
of the table `ARMS`: with an optimizer, or with SGD and noise or restarts. Each gets the same number of rates, scaled
with the batch; the one with the least loss of images that are neither trained on nor tested counts. What is printed is
what was measured, whichever is better.
`--help` lists the options; `--quick` takes a minute.
"""

import argparse
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

from examples.digits import PARTS, Digits, DigitsNet
from examples.outcomes import LARGE, SMALL, Entry, Outcome, conclusion, draw, head, row
from lightning_hybrid.callbacks import GradientNoise, LearningRateWarmup, OptimizerRestart, WeightDecayRules
from lightning_hybrid.optim import SM3, Adafactor, Lamb, Lars, OptimizerTransition, RMSpropToSGD, transition_schedule

STEP = 3.0  # from one rate to the next
NOISE = 1e-5  # of all 44,014 weights together it has a length of 0.7 in the first step
RULES: dict[Any, float] = {"*bias": 0, "BatchNorm2d": 0}


class Run(NamedTuple):
    """One training."""

    arm: str
    batch: int
    rate: float
    seed: int
    epochs: int

    @property
    def steps_per_epoch(self) -> float:
        return PARTS["train"] / self.batch


class Arm(NamedTuple):
    """A way of training.

    Attributes:
        optimizer: Makes it, of parameters, a rate and the run.
        rate: The middle one of those that are tried at a batch of 32.
        power: Of the batch, with which rates grow: 1 (Goyal et al. 2017, for SGD), or 0.5 where steps are divided by
            a root of squared gradients (You et al. 2020, for LAMB).
        warmup: Share of all steps.
        callbacks: Makes those that belong to it, for a run.
        cycles: Of the cosine, each twice as long as the one before: 1 is half a cosine down to 0.
    """

    optimizer: Callable[[Sequence[Parameter], float, Run], Optimizer]
    rate: float
    power: float
    warmup: float = 0.2
    callbacks: Callable[[Run], list[Callback]] = lambda run: []
    cycles: int = 1


def nesterov(parameters: Sequence[Parameter], rate: float, run: Run) -> Optimizer:
    return SGD(parameters, rate, 0.9, nesterov=True, weight_decay=5e-4)


def rmsprop_to_sgd(parameters: Sequence[Parameter], rate: float, run: Run) -> Optimizer:
    """As published, with its epochs in proportion to those of a training, which were 90."""
    epochs = {"center": 10 / 90 * run.epochs, "period": 5 / 90 * run.epochs}
    return RMSpropToSGD(parameters, rate, steps_per_epoch=run.steps_per_epoch, weight_decay=5e-4, **epochs)


def adamw_to_sgd(parameters: Sequence[Parameter], rate: float, run: Run) -> Optimizer:
    """Half of a training each; the rate that is tried is SGD's."""
    first = ARMS["AdamW"].optimizer(parameters, ARMS["AdamW"].rate * (run.batch / SMALL) ** 0.5, run)
    steps = run.epochs * run.steps_per_epoch
    return OptimizerTransition(first, nesterov(parameters, rate, run), transition_schedule(steps / 2, steps / 4))


def quarter(run: Run) -> int:
    """Steps of a quarter of a training."""
    return math.ceil(run.epochs * run.steps_per_epoch / 4)


ARMS = {
    "SGD": Arm(nesterov, 0.05, 1),
    "AdamW": Arm(lambda p, rate, run: AdamW(p, rate, weight_decay=0.01), 3e-3, 0.5),
    "LARS": Arm(lambda p, rate, run: Lars(p, rate, weight_decay=5e-4), 0.5, 1),
    "LAMB": Arm(lambda p, rate, run: Lamb(p, rate, weight_decay=0.01), 1e-2, 0.5),
    # rates are the schedule's, and norms that are 0 at first must grow
    "Adafactor": Arm(
        lambda p, rate, run: Adafactor(
            p, rate, weight_decay=0.01, relative_step=False, scale_parameter=False, min_dim_size_to_factor=8
        ),
        3e-3,
        0.5,
    ),
    "SM3": Arm(lambda p, rate, run: SM3(p, rate, momentum=0.9, weight_decay=1e-3), 0.1, 0.5),
    "RMSpropToSGD": Arm(rmsprop_to_sgd, 0.05, 1, warmup=0),
    "AdamW to SGD": Arm(adamw_to_sgd, 0.05, 1),
    "SGD + noise": Arm(nesterov, 0.05, 1, callbacks=lambda run: [GradientNoise(eta=NOISE, seed=run.seed)]),
    "SGD + restarts": Arm(nesterov, 0.05, 1, callbacks=lambda run: [OptimizerRestart(every=quarter(run))]),
    "SGD + cycles": Arm(nesterov, 0.05, 1, callbacks=lambda run: [OptimizerRestart()], cycles=3),
}


class Result(NamedTuple):
    """Of a training: loss of the images that choose, infinite if it is no number; share of test images told right."""

    loss: float
    accuracy: float


class LargeBatchNet(DigitsNet):
    """The network with the optimizer of a run and its schedule, which falls to 0 by half a cosine or several.

    Args:
        run: Which it is.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(batch_size=run.batch)
        self.run = run

    def configure_optimizers(self) -> OptimizerLRScheduler:
        arm = ARMS[self.run.arm]
        optimizer = arm.optimizer(list(self.parameters()), self.run.rate, self.run)
        steps = int(self.trainer.estimated_stepping_batches)
        first = math.ceil(steps / (2**arm.cycles - 1))
        scheduler = CosineAnnealingWarmRestarts(optimizer, first, T_mult=2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(run: Run, strategy: str = "auto", devices: int = 1) -> Result:
    """Train once."""
    seed_everything(run.seed, verbose=False)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    arm = ARMS[run.arm]
    warmup = round(arm.warmup * run.epochs * run.steps_per_epoch)
    callbacks = [WeightDecayRules(RULES), *arm.callbacks(run)]
    callbacks += [LearningRateWarmup(steps=warmup, start_factor=1 / warmup)] if warmup else []
    options = {"accelerator": "cpu", "devices": devices, "strategy": strategy, "callbacks": callbacks}
    trainer = Trainer(max_epochs=1, num_sanity_val_steps=0, **quiet, **options)
    with redirect_stdout(StringIO()):  # the rules' table
        trainer.fit(LargeBatchNet(run), Digits(run.batch, run.epochs, run.seed))
    loss, accuracy = (float(trainer.callback_metrics[name]) for name in ("validation/loss", "test/accuracy"))
    return Result(loss if math.isfinite(loss) else math.inf, accuracy)


def rates(arm: str, batch: int, number: int) -> list[float]:
    """Those that are tried: the best of a small batch is among those of a large one, scaled."""
    middle = ARMS[arm].rate * (batch / SMALL) ** ARMS[arm].power
    return [middle * STEP ** (i - number // 2) for i in range(number)]


def plan(arm: str, epochs: int, num_seeds: int, num_rates: int) -> list[Run]:
    """All trainings of an optimizer: by batch, rate and seed."""
    return [
        Run(arm, batch, rate, seed, epochs)
        for batch in (SMALL, LARGE)
        for rate in rates(arm, batch, num_rates)
        for seed in range(num_seeds)
    ]


def outcome(results: Mapping[Run, Result]) -> Outcome:
    """Choose the rates of an optimizer by the mean loss over seeds."""
    tried: dict[int, dict[float, list[Result]]] = {}
    for run, result in results.items():
        tried.setdefault(run.batch, {}).setdefault(run.rate, []).append(result)
    best = {}
    for batch, by_rate in tried.items():
        losses = [mean(result.loss for result in of_seeds) for of_seeds in by_rate.values()]
        best[batch] = losses.index(min(losses))

    def entry(batch: int, index: int, *, is_chosen: bool = True) -> Entry:
        rate, of_seeds = list(tried[batch].items())[index]
        is_last = is_chosen and index in (0, len(tried[batch]) - 1)
        return Entry(rate, [result.accuracy for result in of_seeds], is_last)

    return Outcome(entry(SMALL, best[SMALL]), entry(LARGE, best[SMALL], is_chosen=False), entry(LARGE, best[LARGE]))


@contextmanager
def workers(number: int) -> Iterator[Callable[..., Iterable[Result]]]:
    """Give a `map` whose calls run in as many processes of one thread; 0: in this one."""
    if not number:
        yield map
        return
    with ProcessPoolExecutor(number, get_context("spawn"), initializer=prepare) as pool:
        try:
            yield pool.map
        finally:
            pool.shutdown(cancel_futures=True)


def prepare() -> None:
    """One thread, which launchers leave as it is if the environment says so, and none of Lightning's advice."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\.")


@rank_zero_only
def show(text: str) -> None:
    print(text, flush=True)


@rank_zero_only
def show_progress(text: str) -> None:
    print(text, end="\r", file=sys.stderr, flush=True)


def main(
    arms: Sequence[str] = tuple(ARMS),
    epochs: int = 16,
    num_seeds: int = 3,
    num_rates: int = 5,
    folder: str = "large_batch",
    num_workers: int = 0,
    **layout: Any,
) -> dict[str, Outcome]:
    """Train all, and print a row of a table for each optimizer.

    Args:
        arms: Names of the table.
        epochs: Of each training.
        num_seeds: Trainings at each rate.
        num_rates: Of each optimizer and batch.
        folder: Where the picture goes.
        num_workers: Processes that train at the same time; 0: this one.
        layout: `strategy` and `devices` of each training.
    """
    plans = {arm: plan(arm, epochs, num_seeds, num_rates) for arm in arms}
    runs = [run for of_arm in plans.values() for run in of_arm]
    outcomes: dict[str, Outcome] = {}
    show(f"{epochs} epochs; mean accuracy in percent (worst to best of {num_seeds} seeds) at a rate\n{head()}")
    with workers(num_workers) as each:
        results = iter(each(partial(train, **layout), runs))
        for arm, of_arm in plans.items():
            found: dict[Run, Result] = {}
            for run, result in zip(of_arm, results, strict=False):
                found[run] = result
                show_progress(f"{arm}: {len(found)} of {len(of_arm)} trainings")
            best = outcomes[arm] = outcome(found)
            show(row(arm, *(str(entry) for entry in best), f"{best.lost:.1f}"))
    show("* first or last of the rates that were tried: a better one may be beyond")
    show(conclusion(outcomes))
    report(outcomes, folder)
    return outcomes


@rank_zero_only
def report(outcomes: Mapping[str, Outcome], folder: str) -> None:
    """Draw, and say where."""
    path = Path(folder, "large_batch.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(outcomes, path)
    print(f"A picture of the errors is {path}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="optimizers (default: all)")
    parser.add_argument("--epochs", type=int, default=16, help="(default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, dest="num_seeds", help="(default: %(default)s)")
    parser.add_argument("--rates", type=int, default=5, dest="num_rates", help="tried by each (default: %(default)s)")
    parser.add_argument("--folder", default="large_batch", help="of the picture (default: %(default)s)")
    parser.add_argument("--strategy", default="auto", help="such as hybrid_ptdp (default: %(default)s)")
    parser.add_argument("--devices", type=int, default=1, help="of each training (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), dest="num_workers", help="trainings at a time")
    parser.add_argument("--quick", action="store_true", help="two optimizers, 4 epochs, one seed, three rates")
    if "--quick" in sys.argv[1:]:  # what is given besides counts
        parser.set_defaults(arms=["SGD", "LAMB"], epochs=4, num_seeds=1, num_rates=3)
    options = vars(parser.parse_args())
    del options["quick"]
    for name in ("epochs", "num_seeds", "num_rates"):
        if options[name] < 1:
            parser.error(f"--{name.removeprefix('num_')} {options[name]} must be at least 1")
    prepare()
    if options["devices"] > 1:
        options["num_workers"] = 0  # each training has processes of its own
    main(**options)
