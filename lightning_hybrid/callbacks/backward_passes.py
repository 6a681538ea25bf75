"""Small gradients of a training under Lightning's own strategies: each backward pass of each replica gives one."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.functional.noise_scale import GradientSums
from lightning_hybrid.parallel.gradient_squares import GradientSquares, norm_of, square_of
from lightning_hybrid.parallel.pipeline.microbatch import batch_size, check_visible

SAME = 1e-3  # relative difference of squares that replicas may have by rounding, in 16 bits too


class BackwardPasses:
    """Squares of what each backward pass adds, and their sums over the replicas at the end of a window.

    Args:
        trainer: Its replicas hold the whole model, and mean their gradients.
        optimizer: Its parameters count.
    """

    def __init__(self, trainer: Trainer, optimizer: Optimizer) -> None:
        self._trainer, self._optimizer, self._squares = trainer, optimizer, GradientSquares()
        self._samples = 0

    def begin_batch(self, batch: Any) -> None:
        """Learn how many samples the coming pass sees.

        Raises:
            TypeError: If they cannot be counted.
            ValueError: If a step has one gradient only.
        """
        if self._trainer.world_size * self._trainer.accumulate_grad_batches == 1:
            raise ValueError(
                "devices=1 with accumulate_grad_batches=1: each step has one gradient, and its noise shows only beside "
                "a second one. Give accumulate_grad_batches=2, two devices with strategy='ddp', or "
                "HybridPTDPStrategy(num_microbatches=2)."
            )
        check_visible(batch)
        self._samples = batch_size(batch)

    def begin_pass(self) -> None:
        """A backward pass begins."""
        parameters = {f"parameter {index} of the optimizer": p for index, p in enumerate(self._parameters())}
        self._squares.watch(parameters, leaf=lambda parameter: parameter)
        self._squares.begin(set())

    def end_pass(self) -> GradientSums:
        """Its gradient's, on this replica."""
        accumulate = self._trainer.accumulate_grad_batches
        square = float(self._squares.end()) * (accumulate / loss_scale(self._trainer)) ** 2
        return GradientSums.of([(square, self._samples, 1.0 / (self._trainer.world_size * accumulate))])

    def finish(self, window: GradientSums) -> tuple[GradientSums, float]:
        """The sums over all replicas, and the squared norm of the step's gradient; they call it together.

        Raises:
            RuntimeError: If replicas have different gradients.
        """
        norms = [norm_of(p.grad) for p in self._parameters() if p.grad is not None]
        square = float(square_of(norms)) / loss_scale(self._trainer) ** 2
        mine = torch.tensor([*window, square], dtype=torch.float64, device=self._trainer.strategy.root_device)
        *sums, total = self._trainer.strategy.reduce(mine, reduce_op="sum").tolist()
        mean = total / self._trainer.world_size
        if abs(mean - square) > SAME * mean:
            raise RuntimeError(
                f"The squared norm of the gradient is {square:g} on rank {self._trainer.global_rank} and {mean:g} in "
                "the mean over the replicas: they do not sum gradients in each step, as with local SGD. Leave out "
                "GradientNoiseScaleMonitor, or the communication hook."
            )
        return GradientSums(*sums), mean

    def remove(self) -> None:
        """Let backward passes alone."""
        self._squares.remove()

    def _parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]


def loss_scale(trainer: Trainer) -> float:
    """What gradients are multiplied by until the optimizer steps."""
    plugin = trainer.precision_plugin
    scaler = getattr(plugin, "scaler", None)
    return float(getattr(plugin, "loss_scale", 1.0) if scaler is None else scaler.get_scale())
