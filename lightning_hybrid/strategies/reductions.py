"""What Lightning asks a strategy to reduce: over the ranks that see different data, unless it names others."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def reduce_over_data(value: Any, group: dist.ProcessGroup | None, operation: Any) -> Any:
    """A reduced copy of a tensor; anything else as it is.

    Args:
        value: A tensor of any type: whole numbers have a float64 mean, which Lightning's own reduction rounds down.
        group: The ranks; None for all.
        operation: "mean", "avg", "sum", or a `ReduceOp`.
    """
    if not isinstance(value, Tensor):
        return value
    is_mean = operation is None or str(operation).lower() in ("mean", "avg") or operation == dist.ReduceOp.AVG
    result = value.detach().clone()
    if is_mean and not result.is_floating_point() and not result.is_complex():
        result = result.to(torch.float64)
    if isinstance(operation, str) and not is_mean:
        operation = getattr(dist.ReduceOp, operation.upper())
    reduce_op = dist.ReduceOp.SUM if is_mean else operation
    dist.all_reduce(result, op=reduce_op, group=group)
    size = dist.get_world_size(group)
    return result.div_(size) if is_mean else result
