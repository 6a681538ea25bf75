"""Optimizers that a layout cannot have, refused before training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import LBFGS, Adafactor, Muon, Optimizer, Rprop

from lightning_hybrid.optim.transition import flattened
from lightning_hybrid.parallel.experts.parallel import parameters_of_experts
from lightning_hybrid.parallel.mesh import Layout

KNOWN = ("torch.optim", "lightning_hybrid.optim")  # whose work on slices is known


def check_optimizers(
    optimizers: Sequence[Optimizer], module: LightningModule, layout: Layout, options: Mapping[str, Any]
) -> None:
    """Refuse optimizers that call the closure several times, or cannot work on slices or shards where there are some.

    Raises:
        ValueError: Naming the optimizer.
    """
    sharded = layout.data > 1 and options["zero_stage"] > 0 and module.automatic_optimization
    if layout.tensor > 1:
        _check_work_on_slices(optimizers, "tensor_parallel_size", layout.tensor)
    if layout.expert > 1:
        experts = parameters_of_experts(module)
        with_experts = [o for o in optimizers if any(p in experts for g in o.param_groups for p in g["params"])]
        _check_work_on_slices(with_experts, "expert_parallel_size", layout.expert)
    for optimizer in flattened(optimizers):
        if isinstance(optimizer, Adafactor | Rprop) and sharded:
            raise ValueError(
                f"torch.optim.{type(optimizer).__name__} cannot work on sharded parameters. Set zero_stage=0, or "
                "choose another one."
            )
        if isinstance(optimizer, LBFGS):
            raise ValueError(
                "LBFGS evaluates the loss several times a step, which a pipeline's step cannot do. Choose another "
                "optimizer."
            )


def _check_work_on_slices(optimizers: Sequence[Optimizer], keyword: str, size: int) -> None:
    for optimizer in flattened(optimizers):
        name = type(optimizer).__name__
        if isinstance(optimizer, Adafactor | Muon):
            raise ValueError(
                f"torch.optim.{name} looks at whole parameters, and with {keyword}={size} it would see slices. Choose "
                f"an optimizer that works element by element, such as AdamW, or set {keyword}=1."
            )
        if not type(optimizer).__module__.startswith(KNOWN) and not isinstance(optimizer, LBFGS):
            rank_zero_warn(
                f"{name} sees slices of the split parameters with {keyword}={size}. If it works element by element, "
                "nothing changes; if it takes norms or means of a parameter, they are those of a slice."
            )
