"""Gradient clipping over the whole model instead of this rank's part."""

from __future__ import annotations

from lightning.pytorch.plugins import Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.parallel.engine import Engine
from lightning_hybrid.parallel.gradients import gradient_norm, local, scale_gradients

EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class Clipping:
    """Takes the place of a precision plugin's clipping, which sees only what an optimizer on this rank holds."""

    def __init__(self, engine: Engine, precision: Precision) -> None:
        self._engine, self._precision = engine, precision
        vars(precision).update(clip_grad_by_norm=self.by_norm, clip_grad_by_value=self.by_value)

    def remove(self) -> None:
        """Give the plugin its own clipping back."""
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            vars(self._precision).pop(name, None)

    def by_norm(self, optimizer: Optimizer, clip_val: float | int) -> None:
        """Scale all gradients so that their norm is at most `clip_val`."""
        if clip_val <= 0:
            return
        norm = self.norm(optimizer)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        scale_gradients(held, (clip_val / (norm + EPSILON)).clamp(max=1.0))

    def by_value(self, optimizer: Optimizer, clip_val: float | int) -> None:
        """Limit each element to [-clip_val, clip_val]."""
        if clip_val <= 0:
            return
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None:
                local(parameter.grad).clamp_(-clip_val, clip_val)

    def norm(self, optimizer: Optimizer) -> Tensor:
        """2-norm of the gradients of all parameters that the optimizer has on any rank: a float64 scalar."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        counted = [p for p in self._engine.counted_parameters() if id(p) in held]
        return gradient_norm(counted, device=self._engine.mesh.device)
