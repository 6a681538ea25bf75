"""A loss with known derivatives, a model that measures its validation, and fits of it under any strategy."""

import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import Metric

from lightning_hybrid.metrics import HessianTopEigenvalue, Sharpness
from tests.small import Small, fit, hybrid, loader, weights


class Quadratic(nn.Module):
    """Half x'Hx of two parameters that together are x."""

    def __init__(self, x, hessian):
        super().__init__()
        self.first, self.rest = (nn.Parameter(part.clone()) for part in x.split([2, len(x) - 2]))
        self.hessian = hessian

    def loss(self):
        x = torch.cat([self.first, self.rest])
        return x @ self.hessian @ x / 2


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Measured(Small):
    """Weighted by their samples, batches count as they do in one process."""

    depth = 2

    def __init__(self):
        super().__init__()
        self.box, self.relative = Sharpness(steps=3), Sharpness(0.01, "scale_invariant", steps=3)
        self.top = HessianTopEigenvalue(tolerance=0.05)

    def validation_step(self, batch, batch_idx):
        for name, metric in self.named_children():
            if isinstance(metric, Metric):
                metric.update(self, self.loss, batch, weight=len(batch[0]))
                self.log(name, metric)


class Unmeasured(Measured):
    def validation_step(self, batch, batch_idx):
        return None


def measure(zero, number, model=Measured):
    """Values and weights after a fit that validates `number` samples after each batch, also within a window.

    Args:
        zero: Stage of `hybrid_ptdp`, or the name of another strategy.
    """
    data = dist.get_world_size() if dist.is_initialized() else 1
    strategy = zero if isinstance(zero, str) else hybrid(1, microbatches=1, zero_stage=zero)
    loaders = loader(12, 4, data), strategy, loader(number, 4, data, seed=1)
    windows = {"accumulate_grad_batches": 2, "val_check_interval": 1, "num_sanity_val_steps": 0}
    trainer = fit(model(), *loaders, **windows)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, dict(weights(trainer))


def measure_all(tasks):
    return [measure(*task) for task in tasks]
