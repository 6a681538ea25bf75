"""What a K-FAC preconditioner asks of a run, under any strategy."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import nn

from lightning_hybrid.callbacks.global_batch import num_replicas


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


def part_of_gradient(trainer: Trainer) -> float:
    """What gradients in the window's backward passes are multiplied by to be parts of the step's gradient."""
    ask = getattr(trainer.strategy, "window_factor", None)
    factor = 1.0 / trainer.world_size if ask is None else ask()
    plugin: Any = trainer.precision_plugin
    scaler = getattr(plugin, "scaler", None)
    return float(factor if scaler is None else factor / scaler.get_scale())
