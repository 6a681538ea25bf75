"""Loss and gradient norm of a step, over all replicas, before its update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_hybrid.compat import foreach


def step_values(trainer: Trainer, optimizer: Optimizer, losses: Sequence[Tensor]) -> tuple[float, float] | None:
    """What a step is judged by; all ranks call it together, in `on_before_optimizer_step`.

    Args:
        trainer: In `fit`.
        optimizer: Whose gradients count, each once, wherever they are.
        losses: Of the batches of its window, as `on_before_backward` has them: divided by their number, and scaled.

    Returns:
        The mean loss and the 2-norm of the gradients, equal on all ranks; None if the step is about to be skipped by a
        loss scaler, or has no loss: `training_step` may return None.
    """
    precision: Any = trainer.precision_plugin
    scaler = getattr(precision, "scaler", None)
    scale = 1.0 if scaler is None else float(scaler.get_scale())
    is_scaled = scaler is not None and any(group.get("fused") for group in optimizer.param_groups)
    norm = _norm(trainer, optimizer)
    loss = torch.stack(list(losses)).sum() if losses else torch.zeros((), device=norm.device)
    norm = norm / (scale if is_scaled else 1.0)
    values = torch.stack([loss.to(norm.device, torch.float64) / scale, norm, norm.new_tensor(float(bool(losses)))])
    if not hasattr(trainer.strategy, "gradient_norm"):  # whose losses are those of all replicas
        values = trainer.strategy.reduce(values, reduce_op="mean")
    mean, norm_of_all, share = values.tolist()  # of replicas that have a loss
    overflows = scaler is not None and not isfinite(norm_of_all)
    if overflows or not share or getattr(precision, "is_skipped", False):
        return None
    return mean / share, norm_of_all


def _norm(trainer: Trainer, optimizer: Optimizer) -> Tensor:
    ask: Callable[[Optimizer], Tensor] | None = getattr(trainer.strategy, "gradient_norm", None)
    if ask is not None:
        return ask(optimizer).to(torch.float64)
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=trainer.strategy.root_device)
    if all(type(gradient) is Tensor and gradient.device == gradients[0].device for gradient in gradients):
        return torch.linalg.vector_norm(torch.stack(foreach("norm")(gradients, 2)), dtype=torch.float64)
    norm = torch.nn.utils.get_total_norm(gradients)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return norm.to(torch.float64)
