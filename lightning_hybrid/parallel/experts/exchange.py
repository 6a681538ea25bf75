"""Tokens sent to the ranks that hold their experts, and what those make of them sent back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class TokenExchange:
    """Over ranks that each hold the same number of experts, in the order of the ranks; all of them call it together.

    Counts of tokens go first, then the tokens: as many as each pair of ranks has for each other, none for most if a
    router is far from balanced. Nothing is padded and nothing dropped (GShard, arXiv:2006.16668, has fixed capacities
    here).

    Args:
        group: The ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size = group, group.size()

    def dispatch(self, tokens: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """Send tokens to the holders of their experts.

        Args:
            tokens: [P, D], sorted by expert.
            counts: [num_experts], int64: how many each expert gets.

        Returns:
            [R, D], what arrives here, which is waited for when it is asked for; [num_experts / size], how many each
            expert here gets; and a function that brings [R, D'] back to where the tokens came from, [P, D'].
        """
        here = torch.empty_like(counts)
        dist.all_to_all_single(here, counts, group=self.group)
        sent = counts.view(self.size, -1).sum(1).tolist()
        by_rank = here.view(self.size, -1)  # of each rank, how many for each expert here
        received = by_rank.sum(1).tolist()
        order = _by_expert(by_rank)
        arrived = _AllToAll.apply(tokens, received, sent, self.group)

        def back(outputs: Tensor) -> Tensor:
            scattered = torch.empty_like(order)
            scattered[order] = torch.arange(len(order), device=order.device)
            result: Tensor = _AllToAll.apply(outputs[scattered], sent, received, self.group)
            return result

        return arrived[order], by_rank.sum(0), back


def _by_expert(by_rank: Tensor) -> Tensor:
    """Order of what has come rank by rank, and in it expert by expert, that sorts it by expert."""
    ranks, experts = by_rank.shape
    numbers = torch.arange(experts, device=by_rank.device).repeat(ranks)
    return torch.repeat_interleave(numbers, by_rank.reshape(-1)).argsort(stable=True)


class _AllToAll(torch.autograd.Function):
    """An exchange whose backward pass is the exchange in the other direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return _exchange(x, received, sent, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradients[0], ctx.sent, ctx.received, ctx.group), None, None, None


def _exchange(x: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=group)
    return out
