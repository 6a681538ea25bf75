"""What a growing run cannot have: arguments out of range, and Trainers that would count other batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.optim.lr_scheduler import ExponentialLR, MultiStepLR, StepLR

from lightning_hybrid.callbacks.arguments import check_whole
from lightning_hybrid.callbacks.growth_progress import GrowthPlan
from lightning_hybrid.callbacks.learning_rate_scaling import LearningRateScaling
from lightning_hybrid.functional.growth import step_decays


def plan_of(
    milestones: Sequence[int] | Mapping[int, float] | None,
    on_plateau: str | None,
    factor: float,
    max_batch: int | None,
) -> GrowthPlan:
    """The plan that a user has asked for.

    Raises:
        ValueError: If an argument is outside its range, or it is not said when a batch grows.
    """
    if (milestones is None) == (on_plateau is None):
        raise ValueError(f"milestones={milestones!r} and on_plateau={on_plateau!r}: give one of the two.")
    if max_batch is not None:
        check_whole("max_batch", max_batch, 1)
    factors = {} if milestones is None else _factors_of(milestones, factor)
    if milestones is None and (not isinstance(on_plateau, str) or not on_plateau):
        raise ValueError(f"on_plateau={on_plateau!r} must be the name of a logged value, such as 'val_loss'.")
    if milestones is None and max_batch is None:
        raise ValueError("on_plateau needs max_batch: nobody knows how many plateaus there will be.")
    for name, each in {"factor": factor, **{f"factor of milestone {m}": each for m, each in factors.items()}}.items():
        if not _is_number(each) or each <= 1:
            raise ValueError(f"{name}={each!r} must be a finite number above 1.")
    return GrowthPlan({each: float(factors[each]) for each in sorted(factors)}, float(factor), max_batch)


def _factors_of(milestones: Sequence[int] | Mapping[int, float], factor: float) -> dict[int, float]:
    is_list = isinstance(milestones, Sequence) and not isinstance(milestones, str)
    if not milestones or not (is_list or isinstance(milestones, Mapping)):
        raise ValueError(f"milestones={milestones!r} must be a list of them, or factors by milestone, and not empty.")
    for milestone in milestones:
        check_whole("each milestone", milestone, 1)
    if len(set(milestones)) < len(milestones):
        raise ValueError(f"milestones={milestones!r} has one twice. Give {{milestone: factor}} for larger factors.")
    return dict(milestones) if isinstance(milestones, Mapping) else dict.fromkeys(milestones, factor)


def decays_of(
    schedule: Mapping[int, float] | Sequence[int] | int, gamma: float | None, length: int | None
) -> dict[int, float]:
    """Factors of the first rate, by milestone; see `BatchSizeGrowth.from_lr_schedule`.

    Raises:
        ValueError: If arguments are missing, or do not belong together.
    """
    if isinstance(schedule, Mapping):
        if gamma is not None or length is not None:
            raise ValueError(f"schedule={schedule!r} has all factors. Leave gamma={gamma} and length={length} out.")
        for milestone, factor in schedule.items():
            if not _is_number(factor):
                raise ValueError(f"schedule={schedule!r} must have numbers, and has {factor!r} at {milestone!r}.")
        return dict(schedule)
    if isinstance(schedule, int) == (length is None) or gamma is None:
        raise ValueError(
            f"schedule={schedule!r}, gamma={gamma!r}, length={length!r}: give milestones with gamma, a step_size with "
            "gamma and length, or {milestone: factor}."
        )
    if not _is_number(gamma):
        raise ValueError(f"gamma={gamma!r} must be a finite number.")
    if isinstance(schedule, int):
        check_whole("schedule", schedule, 1)
        check_whole("length", length, schedule + 1)
        schedule = range(schedule, length or 0, schedule)
    return step_decays(schedule, gamma)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def check_choices(unit: str, interval: str, mode: str) -> None:
    """Refuse words that are none of those that can be chosen.

    Raises:
        ValueError: With the argument's name and value.
    """
    given = (("unit", unit, ("samples", "tokens")), ("interval", interval, ("epoch", "step")))
    for name, value, choices in (*given, ("mode", mode, ("min", "max"))):
        if value not in choices:
            raise ValueError(f"{name}={value!r} must be {' or '.join(map(repr, choices))}.")


def check_patience(patience: int, min_delta: float) -> None:
    """Refuse what is no patience.

    Raises:
        ValueError: With the argument's name and value.
    """
    check_whole("patience", patience, 1, " of validations")
    if not _is_number(min_delta) or min_delta < 0:
        raise ValueError(f"min_delta={min_delta!r} must be a finite number of at least 0.")


def check_trainer(trainer: Trainer, pl_module: LightningModule, name: str) -> None:
    """Refuse what accumulates by itself, or would undo the growth; call it in `setup`.

    Raises:
        ValueError: Naming the feature and the way out.
    """
    if not pl_module.automatic_optimization:
        raise ValueError(
            f"{name} lets accumulate_grad_batches grow, and {type(pl_module).__name__} optimizes manually. Set "
            "automatic_optimization=True, or accumulate in the module and leave the callback out."
        )
    if trainer.strategy.handles_gradient_accumulation:
        raise ValueError(
            f"{name} lets accumulate_grad_batches grow during training, and {type(trainer.strategy).__name__} "
            "accumulates by itself. Use strategy='ddp' or 'hybrid_ptdp'."
        )
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    reasons = {
        GradientAccumulationScheduler: "sets accumulate_grad_batches too",
        LearningRateScaling: "makes rates follow the batch, and the noise would not fall",
    }
    for kind, reason in reasons.items():
        if any(isinstance(callback, kind) for callback in callbacks):
            raise ValueError(f"{kind.__name__} {reason}, beside {name}. Leave one of the two out.")


def check_schedulers(trainer: Trainer) -> None:
    """Refuse a schedule beside the growth that takes its place; from `on_fit_start` on.

    Raises:
        ValueError: Naming the scheduler.
    """
    for config in trainer.lr_scheduler_configs:
        if isinstance(config.scheduler, StepLR | MultiStepLR | ExponentialLR):
            raise ValueError(
                f"BatchSizeGrowth.from_lr_schedule takes the place of {type(config.scheduler).__name__}, which "
                "configure_optimizers returns too: the noise would decay twice. Leave the scheduler out."
            )


def check_validation(trainer: Trainer, on_plateau: str | None) -> None:
    """Refuse to wait for validations that never come; from `on_train_start` on.

    Raises:
        ValueError: Naming the value.
    """
    if not trainer.enable_validation:
        raise ValueError(
            f"BatchSizeGrowth(on_plateau={on_plateau!r}) counts validations, and this fit has none. Give the Trainer a "
            "validation loader, or give milestones."
        )


def check_place(trainer: Trainer, name: str, before: int, now: int) -> None:
    """Refuse to go on in an epoch with other loader batches, where places in the data do not count samples.

    Args:
        trainer: In `on_train_start`.
        name: Of the callback.
        before: Samples of a loader batch of all replicas when the checkpoint was saved.
        now: Those of this fit.

    Raises:
        ValueError: With both.
    """
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    is_between = progress.is_last_batch or not progress.current.ready
    if now == before or not trainer.fit_loop.restarting or is_between:
        return
    if not getattr(trainer.strategy, "counts_samples", False):
        raise ValueError(
            f"{name}: the checkpoint is of the middle of an epoch, after {progress.current.ready} batches of {before} "
            f"samples over all replicas. Now they have {now}, and {type(trainer.strategy).__name__} goes on by their "
            "number, not by samples. Go on with as many replicas, or from a checkpoint of an epoch's end "
            "(ModelCheckpoint(every_n_epochs=1)), or use strategy='hybrid_ptdp'."
        )
