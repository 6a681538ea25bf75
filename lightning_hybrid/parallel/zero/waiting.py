"""Gradients of a window that wait for their sum, where the parameters that modules show have another type.

`fully_shard` then keeps them in the type of the sum, and sees only those that are there; it sums one type at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lightning_hybrid.compat import set_partial_sum, sharded_groups, sharded_records


def waiting_gradients(modules: Iterable[FSDPModule]) -> list[Tensor]:
    """Those of all units, whole."""
    every = [p.unsharded_accumulated_grad for module in modules for p in sharded_records(module)]
    return [gradient for gradient in every if gradient is not None]


def complete_waiting(module: FSDPModule, dtype: torch.dtype) -> None:
    """Let all of a unit's gradients wait if any does, with zeros where there is none yet."""
    trained = [p for p in sharded_records(module) if p.sharded_param.requires_grad]
    if any(p.unsharded_accumulated_grad is not None for p in trained):
        for p in trained:
            if p.unsharded_accumulated_grad is None:
                p.unsharded_accumulated_grad = torch.zeros_like(p.unsharded_param, dtype=dtype)


def drop_waiting(modules: Iterable[FSDPModule]) -> None:
    """Forget them, and what is summed over a part of the replicas only."""
    for module in modules:
        for group in sharded_groups(module):
            set_partial_sum(group, None)
        for parameter in sharded_records(module):
            parameter.unsharded_accumulated_grad = None
