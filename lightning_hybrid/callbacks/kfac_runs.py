"""What a K-FAC preconditioner asks of a run, under any strategy."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import nn

from lightning_hybrid.callbacks.global_batch import num_replicas, over_replicas


def held_by_name(trainer: Trainer) -> dict[str, nn.Parameter]:
    """What this rank has of the parameters, as optimizers have it."""
    ask = getattr(trainer.strategy, "held_parameters", None)
    return dict(trainer.lightning_module.named_parameters() if ask is None else ask())


def replica_group(trainer: Trainer) -> dist.ProcessGroup | None:
    """Ranks that have the same layers and see different data; None without others."""
    if num_replicas(trainer) == 1:
        return None
    group: dist.ProcessGroup | None = getattr(trainer.strategy, "data_group", None)
    return dist.group.WORLD if group is None else group


def samples_of_loss(trainer: Trainer, samples: int) -> float:
    """Samples that the loss of this replica's batch is a mean over where it is differentiated; ranks call it together.

    Args:
        trainer: In `on_train_batch_start`.
        samples: This replica's.
    """
    joined = getattr(trainer.strategy, "joined_batches", None)
    return samples if joined is None else over_replicas(trainer, samples)[0] / joined


def slopes_factor(trainer: Trainer, samples: int, first: float) -> float:
    """What a window's sums of products of slopes are multiplied by to be a mean over samples of those of their losses.

    A sample's loss is its addend of the mean that a batch's loss is, which has been divided by
    `accumulate_grad_batches`, however many batches the window has. Where losses have weights of their own, it is the
    sample's addend of the step's loss times the number of samples.

    Args:
        trainer: In `on_before_optimizer_step`.
        samples: Of the window, over all replicas.
        first: `samples_of_loss` of the window's first batch, in whose units its slopes are.
    """
    strategy: Any = trainer.strategy
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    factor = strategy.window_factor() if hasattr(strategy, "window_factor") else 1.0
    factor = factor if scaler is None else factor / scaler.get_scale()
    each = samples if weighs_losses(trainer) else first * trainer.accumulate_grad_batches
    return float((each * factor) ** 2 / samples)


def weighs_losses(trainer: Trainer) -> bool:
    """Whether the steps of a window have returned weights of their losses; known behind its first batch."""
    return bool(getattr(trainer.strategy, "weighs_losses", False))


class OwnPasses:
    """Whether the backward pass under way is one of training's own, and not one that a step asks for in itself.

    Args:
        trainer: In `fit`. Its strategy tells of backward passes that are not between Lightning's hooks.
    """

    def __init__(self, trainer: Trainer) -> None:
        watch = getattr(trainer.strategy, "watch_passes", None)
        self._watched: Any = None if watch is None else watch()
        self._is_under_way = False

    def __call__(self) -> bool:
        """Whether it is."""
        return self._is_under_way or (self._watched is not None and self._watched.is_backward)

    def begin(self) -> None:
        """One begins."""
        self._is_under_way = True

    def end(self) -> None:
        """It has ended."""
        self._is_under_way = False

    def remove(self) -> None:
        """Follow no more."""
        if self._watched is not None:
            self._watched.remove()
            self._watched = None
