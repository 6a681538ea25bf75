"""Sums over the ranks among which an axis deals out plain tensors, for optimizers that look at wholes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.optim.wholes import Operation

OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass(frozen=True)
class GroupAxis:
    """The ranks of a process group, as `lightning_hybrid.optim.wholes.Axis`.

    Attributes:
        group: They.
        device: Where they communicate.
    """

    group: dist.ProcessGroup
    device: torch.device

    def reduce(self, values: Tensor, operation: Operation) -> Tensor:
        """As `Axis` says."""
        reduced = values.to(self.device, copy=True)
        dist.all_reduce(reduced, OPERATIONS[operation], group=self.group)
        return reduced.to(values.device)
