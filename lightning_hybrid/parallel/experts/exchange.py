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

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenExchange:
        return self  # a copy of a layer sends its tokens over the same ranks

    def dispatch(
        self, tokens: Tensor, counts: Tensor, meanwhile: Callable[[], None] | None = None
    ) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """Send tokens to the holders of their experts.

        Args:
            tokens: [P, D], sorted by expert.
            counts: [num_experts], int64: how many each expert gets.
            meanwhile: Called while they travel.

        Returns:
            [R, D], what arrives here, sorted by expert; [num_experts / size], how many each expert here gets; and a
            function that brings [R, D'] back to where the tokens came from, [P, D'].
        """
        here = torch.empty_like(counts)
        dist.all_to_all_single(here, counts, group=self.group)
        sent = counts.view(self.size, -1).sum(1).tolist()
        by_rank = here.view(self.size, -1)  # of each rank, how many for each expert here
        received = by_rank.sum(1).tolist()
        under_way: list[dist.Work] = []
        arriving = _AllToAll.apply(tokens, received, sent, self.group, under_way)
        order = _by_expert(by_rank)
        if meanwhile is not None:
            meanwhile()
        arrived: Tensor = _Arrived.apply(arriving, under_way)

        def back(outputs: Tensor) -> Tensor:
            scattered = torch.empty_like(order)
            scattered[order] = torch.arange(len(order), device=order.device)
            returning: list[dist.Work] = []
            result: Tensor = _Arrived.apply(
                _AllToAll.apply(outputs[scattered], sent, received, self.group, returning), returning
            )
            return result

        return arrived[order], by_rank.sum(0), back


def _by_expert(by_rank: Tensor) -> Tensor:
    """Order of what has come rank by rank, and in it expert by expert, that sorts it by expert."""
    ranks, experts = by_rank.shape
    numbers = torch.arange(experts, device=by_rank.device).repeat(ranks)
    return torch.repeat_interleave(numbers, by_rank.reshape(-1)).argsort(stable=True)


class _AllToAll(torch.autograd.Function):
    """Starts an exchange whose backward pass is the exchange in the other direction."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        received: Sequence[int],
        sent: Sequence[int],
        group: dist.ProcessGroup,
        under_way: list[dist.Work],
    ) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return _start(x, received, sent, group, under_way)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        under_way: list[dist.Work] = []
        gradient = _start(gradients[0], ctx.sent, ctx.received, ctx.group, under_way)
        _wait(under_way)
        return gradient, None, None, None, None


class _Arrived(torch.autograd.Function):
    """Waits for what has been started."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, under_way: list[dist.Work]) -> Tensor:
        _wait(under_way)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _start(
    x: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup, under_way: list[dist.Work]
) -> Tensor:
    out, x = x.new_empty(sum(received), *x.shape[1:]), x.contiguous()
    work = dist.all_to_all_single(out, x, list(received), list(sent), group=group, async_op=True)
    assert work is not None
    under_way += [work]
    return out


def _wait(under_way: list[dist.Work]) -> None:
    for work in under_way:
        work.wait()
