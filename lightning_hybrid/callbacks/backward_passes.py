"""Small gradients of a training under Lightning's own strategies: each backward pass of each replica gives one."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.callbacks.global_batch import count_samples
from lightning_hybrid.functional.noise_scale import GradientSums
from lightning_hybrid.parallel.gradient_squares import GradientSquares, norm_of, square_of

SAME = 1e-3  # relative difference of squares that replicas may have by rounding, in 16 bits too


class BackwardPasses:
    """Squares of what each backward pass adds, and their sums over the replicas at the end of a window.

    They stay on the device until then, which is waited for once a window.

    Args:
        trainer: Its replicas hold the whole model, and mean their gradients.
        optimizer: Its parameters count.
    """

    def __init__(self, trainer: Trainer, optimizer: Optimizer) -> None:
        self._trainer, self._optimizer, self._squares = trainer, optimizer, GradientSquares()
        self._samples = 0
        self._passes: list[tuple[Tensor | float, int]] = []  # of a window: squares, and samples

    def begin_window(self) -> None:
        """Forget the passes of a window that was never applied."""
        self._passes = []

    def check_parts(self) -> None:
        """Refuse steps that have one gradient only.

        Raises:
            ValueError: With the way out.
        """
        if self._trainer.world_size * self._trainer.accumulate_grad_batches == 1:
            raise ValueError(
                "devices=1 with accumulate_grad_batches=1: each step has one gradient, and its noise shows only beside "
                "a second one. Give accumulate_grad_batches=2, two devices with strategy='ddp', or "
                "HybridPTDPStrategy(num_microbatches=2)."
            )

    def begin_batch(self, batch: Any) -> None:
        """Learn how many samples the coming pass sees.

        Raises:
            TypeError: If they cannot be counted.
        """
        self._samples = count_samples(batch)

    def begin_pass(self) -> None:
        """A backward pass begins."""
        parameters = {f"parameter {index} of the optimizer": p for index, p in enumerate(self._parameters())}
        self._squares.watch(parameters, leaf=lambda parameter: parameter)
        self._squares.begin(set())

    def end_pass(self) -> GradientSums:
        """None yet, as `finish` has them."""
        self._passes.append((self._squares.end(), self._samples))
        return GradientSums()

    def finish(self, window: GradientSums) -> tuple[GradientSums, float]:
        """The sums over all replicas, and the squared norm of the step's gradient; they call it together.

        Raises:
            RuntimeError: If replicas have different gradients.
        """
        square, *squares = self._read()
        accumulate, world = self._trainer.accumulate_grad_batches, self._trainer.world_size
        samples, self._passes = [samples for _, samples in self._passes], []
        weight = 1.0 / (world * accumulate)
        rows = [(accumulate**2 * own, number, weight) for own, number in zip(squares, samples, strict=True)]
        mine = [*window.plus(GradientSums.of(rows)), square, square**2]
        device = self._trainer.strategy.root_device
        total = self._trainer.strategy.reduce(torch.tensor(mine, dtype=torch.float64, device=device), reduce_op="sum")
        *sums, mean, second = total.tolist()
        mean, second = mean / world, second / world
        if second - mean**2 > (SAME * mean) ** 2:  # which all of them see
            raise RuntimeError(
                f"The squared norm of the gradient is {square:g} on rank {self._trainer.global_rank} and {mean:g} in "
                "the mean over the replicas: they do not sum gradients in each step, as with local SGD. Leave out "
                "GradientNoiseScaleMonitor, or the communication hook."
            )
        return GradientSums(*sums), mean

    def remove(self) -> None:
        """Let backward passes alone."""
        self._squares.remove()

    def _read(self) -> list[float]:
        """The squared norm of the step's gradient, and those of the window's passes, of unscaled losses."""
        norms = [norm_of(p.grad) for p in self._parameters() if p.grad is not None]
        found = [square_of(norms), *(square for square, _ in self._passes)]
        device = self._trainer.strategy.root_device
        on_device = [torch.as_tensor(square, dtype=torch.float64, device=device) for square in found]
        unscaled: list[float] = (torch.stack(on_device) / loss_scale(self._trainer) ** 2).tolist()
        return unscaled

    def _parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]


def loss_scale(trainer: Trainer) -> float:
    """What gradients are multiplied by until the optimizer steps."""
    plugin = trainer.precision_plugin
    scaler = getattr(plugin, "scaler", None)
    return float(getattr(plugin, "loss_scale", 1.0) if scaler is None else scaler.get_scale())
