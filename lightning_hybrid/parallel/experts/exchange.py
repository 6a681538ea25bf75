"""Tokens sent to the ranks that hold their experts, and what those make of them sent back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

COUNTS = 2**40  # more than a count of tokens: what is above it tells the layer


class TokenExchange:
    """Over ranks that each hold the same number of experts, in the order of the ranks; all of them call it together.

    Counts of tokens go first, then the tokens: as many as each pair of ranks has for each other, none for most if a
    router is far from balanced. Nothing is padded and nothing dropped (GShard, arXiv:2006.16668, has fixed capacities
    here).

    Args:
        group: The ranks.
        number: Of the layer, the same on all ranks.
        name: The layer's.
    """

    def __init__(self, group: dist.ProcessGroup, number: int = 0, name: str = "") -> None:
        self.group, self.size, self.number, self.name = group, group.size(), number, name

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

        Raises:
            RuntimeError: On all ranks, if some called another layer.
        """
        told = counts + self.number * COUNTS
        heard = torch.empty_like(told)
        dist.all_to_all_single(heard, told, group=self.group)
        heard = heard.view(self.size, -1)
        by_rank, numbers = heard % COUNTS, heard[:, 0] // COUNTS  # of each rank, how many for each expert here
        # the one place where a device is waited for
        sums = (counts.view(self.size, -1).sum(1), by_rank.sum(1))
        sent, received, called = torch.stack((*sums, numbers)).tolist()
        self._check(called)
        way = _Way(self.group, sent, received)
        arriving = _Depart.apply(tokens, way)
        order = _by_expert(by_rank, sum(received))
        if meanwhile is not None:
            meanwhile()
        arrived: Tensor = _Arrive.apply(arriving, way)

        def back(outputs: Tensor) -> Tensor:
            places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
            way = _Way(self.group, received, sent)
            result: Tensor = _Arrive.apply(_Depart.apply(outputs.index_select(0, places), way), way)
            return result

        return arrived.index_select(0, order), by_rank.sum(0), back

    def _check(self, numbers: list[int]) -> None:
        """Refuse what would send tokens to experts of another layer."""
        others = [rank for rank, number in enumerate(numbers) if number != self.number]
        if others:
            raise RuntimeError(
                f"Replicas called different layers of experts: this one {self.name}, and rank {others[0]} of the "
                f"{self.size} that it shares experts with another one. Tokens travel between them, so all must call "
                "the same layers in the same order: let what skips layers decide alike on all replicas, or set "
                "expert_parallel_size=1."
            )


def _by_expert(by_rank: Tensor, total: int) -> Tensor:
    """Order of what has come rank by rank, and in it expert by expert, that sorts it by expert.

    Args:
        by_rank: [ranks, experts], how many tokens of each rank are for each expert.
        total: Their sum, which a device need not be asked for then.
    """
    ranks, experts = by_rank.shape
    numbers = torch.arange(experts, device=by_rank.device).repeat(ranks)
    return numbers.repeat_interleave(by_rank.reshape(-1), output_size=total).argsort(stable=True)


class _Way:
    """One exchange, and in the backward pass the same one in the other direction.

    Args:
        group: The ranks.
        sent: Rows for each of them.
        received: Rows from each of them.
    """

    def __init__(self, group: dist.ProcessGroup, sent: Sequence[int], received: Sequence[int]) -> None:
        self.group, self.sent, self.received = group, sent, received
        self._under_way: list[tuple[dist.Work, Tensor]] = []

    def start(self, x: Tensor, *, reverse: bool = False) -> Tensor:
        """Send rows on their way; what is returned has no values before `wait`."""
        sent, received = (self.received, self.sent) if reverse else (self.sent, self.received)
        out, x = x.new_empty(sum(received), *x.shape[1:]), x.contiguous()
        work = dist.all_to_all_single(out, x, list(received), list(sent), group=self.group, async_op=True)
        assert work is not None
        self._under_way.append((work, out))
        return out

    def wait(self) -> Tensor:
        """What has come."""
        work, out = self._under_way.pop()
        work.wait()
        return out


class _Depart(torch.autograd.Function):
    """Starts an exchange; its backward pass waits for the gradients that `_Arrive` has sent on their way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        return way.start(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.way.wait(), None


class _Arrive(torch.autograd.Function):
    """Waits for an exchange; its backward pass starts the other direction.

    The gradient that it hands on is none that anybody reads: that of the rows sent has another shape, and lies in the
    way until `_Depart` takes it. Between the two autograd runs what was computed between them, which came later.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        way.wait()
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.way.start(gradients[0], reverse=True)
        return gradients[0], None
