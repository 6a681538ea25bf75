"""Sums of what each rank owns, on gloo: its own reduce_scatter takes twice as long as an exchange of all parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule


class SumByExchange:
    """A reduce_scatter for `fully_shard`: each rank gets the others' parts of what it owns, and adds them up.

    As many bytes travel. The order of the sum is that of the ranks, and 16-bit numbers are rounded once.
    """

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is summed, and for the sum."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Sum, and return when it is done.

        Args:
            output_tensor: Takes the sum of this rank's parts, [n].
            input_tensor: The parts of all ranks, one after the other, [n * ranks].
            group: The ranks.
            op: A sum; `configure` sees to it.
            async_op: Not heeded, for nobody asks for it.
        """
        assert op == dist.ReduceOp.SUM, f"gradients are to be combined by {op}"
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(group.size(), -1), 0, out=output_tensor)


def sum_by_exchange(module: FSDPModule) -> None:
    """Let a module on the CPU sum so; torch before 2.9 takes no other than its own."""
    replace = getattr(module, "set_custom_reduce_scatter", None)
    if replace is not None:
        replace(SumByExchange())
