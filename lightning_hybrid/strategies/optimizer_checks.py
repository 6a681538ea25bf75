"""Optimizers that a layout cannot have, refused before training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import LBFGS, Adafactor, Muon, Optimizer, Rprop

from lightning_hybrid.optim.base import WholeTensorOptimizer
from lightning_hybrid.optim.transition import flattened
from lightning_hybrid.parallel.experts.parallel import parameters_of_experts
from lightning_hybrid.parallel.mesh import Layout

WORKS: dict[type[Optimizer], str] = {Adafactor: "lightning_hybrid.optim.Adafactor"}  # in the place of torch's
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
                f"choose {WORKS.get(type(optimizer), 'another one')}."
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
                f"{WORKS.get(type(optimizer), 'one that works element by element, such as AdamW')}, or set {keyword}=1."
            )
        if not type(optimizer).__module__.startswith(KNOWN) and not isinstance(optimizer, LBFGS | WholeTensorOptimizer):
            rank_zero_warn(
                f"{name} of {type(optimizer).__module__} sees slices of the split parameters with {keyword}={size}. If "
                "it works element by element, nothing changes; if it takes norms or means of a parameter, they are "
                "those of a slice. The optimizers of lightning_hybrid.optim see whole tensors."
            )


def check_complete(module: nn.Module) -> None:
    """Refuse an optimizer of LightningCLI, which has all parameters that the model had then, if there are others now.

    Raises:
        ValueError: Naming the parameters.
    """
    hook: Any = vars(module).get("configure_optimizers")
    while hasattr(hook, "__wrapped__") and not isinstance(hook, MethodType):  # callbacks may have wrapped it
        hook = hook.__wrapped__
    made = getattr(hook, "__func__", None)
    optimizer = made.keywords.get("optimizer") if isinstance(made, partial) else None
    if not isinstance(optimizer, Optimizer):
        return
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    new = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in known]
    if new:
        raise ValueError(
            f"LightningCLI made {type(optimizer).__name__} before configure_model made {', '.join(new[:3])} "
            f"({len(new)} in all), which would never be trained. Make them in __init__, there under "
            "torch.device('meta') if they are large, or return the optimizer from configure_optimizers."
        )
