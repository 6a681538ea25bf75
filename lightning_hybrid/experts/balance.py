"""The loss that keeps a router from sending all tokens to a few experts, and what its fractions are counted over."""

from __future__ import annotations

from typing import Any, Literal
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

BalanceOver = Literal["sequence", "micro_batch", "global"]
OVER = ("sequence", "micro_batch", "global")


def balance_loss(probabilities: Tensor, counts: Tensor) -> Tensor:
    """E * sum_i f_i P_i, averaged over S sequences: arXiv:2101.03961, equations 4 to 6.

    f_i is the fraction of the pairs that expert i has, without a gradient, and P_i the mean of its probabilities.
    There, a token is one pair; here it may be several. Perfectly even routing has a loss of 1.

    Args:
        probabilities: [T, E], of S sequences of equal length; T may be 0, which gives 0.
        counts: [S, E], int64, of the pairs of each sequence, or [1, E].

    Returns:
        A scalar, in the type of `probabilities`.
    """
    loss: Tensor = _BalanceLoss.apply(probabilities, counts)
    return loss


class _BalanceLoss(torch.autograd.Function):
    """Keeps its fractions beside autograd: an activation checkpoint that recomputes them could find others."""

    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, counts: Tensor) -> Tensor:
        (num_tokens, num_experts), num_runs = probabilities.shape, len(counts)
        ctx.num_tokens, ctx.length = num_tokens, num_tokens // num_runs
        shares = counts.to(probabilities.dtype) / counts.sum(-1, keepdim=True).clamp_min(1)
        ctx.factors = shares * (num_experts / max(num_tokens, 1))
        return (probabilities.view(num_runs, ctx.length, num_experts) * ctx.factors[:, None]).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        factors = ctx.factors.repeat_interleave(ctx.length, dim=0, output_size=ctx.num_tokens)
        return gradients[0] * factors, None


class PairCounts:
    """The counts of pairs of which f_i of a balance loss is a fraction.

    Args:
        over: One "sequence"; a "micro_batch", over the replicas in `group`; or "global": all micro-batches that have
            begun since the window began, over the replicas too (arXiv:2501.11873).

    Attributes:
        group: The replicas; None for this process alone.
        window: [E], what "global" has counted; None before anything.

    Raises:
        ValueError: If `over` is another word.
    """

    def __init__(self, over: BalanceOver) -> None:
        if over not in OVER:
            raise ValueError(f"balance_over={over!r} is unknown: choose one of {', '.join(map(repr, OVER))}.")
        self.over = over
        self.group: dist.ProcessGroup | None = None
        self.start_window()

    def start_window(self) -> None:
        """Forget what has been counted."""
        self.window: Tensor | None = None
        self._ahead: list[_Ahead] = []

    def end_step(self) -> None:
        """Begin a window after a step of any optimizer.

        A pass whose backward pass is still to come, as in a model with two optimizers, may have it until the next step.
        """
        self.window = None
        self._ahead = [kept for kept in self._ahead if not kept.is_old]
        for kept in self._ahead:
            kept.is_old = True

    def count(self, counts: Tensor) -> Tensor:
        """Take part in the counting with a micro-batch; all replicas of the group call it together.

        Args:
            counts: [S, E], int64, of each sequence.

        Returns:
            [S, E] for "sequence", else [1, E].
        """
        if self.over == "sequence":
            return counts
        total = counts.sum(0)
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        if self.over == "global":
            _open.add(self)
            total = self.window = total if self.window is None else self.window.to(total.device) + total
        return total[None]

    def keep(self, experts: Tensor, counts: Tensor) -> None:
        """Keep the counts of a pass that is repeated with gradients, to be found by what it has chosen.

        Args:
            experts: [P], of the pairs.
            counts: What `count` has said.
        """
        _open.add(self)
        self._ahead.append(_Ahead(experts, counts))

    def recall(self, experts: Tensor) -> Tensor | None:
        """What `keep` kept for this pass, once; None if nothing. Passes that have chosen alike come in their order."""
        for number, kept in enumerate(self._ahead):
            if torch.equal(kept.experts, experts):
                return self._ahead.pop(number).counts
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> PairCounts:
        """A copy counts over the same replicas, which cannot be copied, and begins a window."""
        copy = object.__new__(type(self))
        vars(copy).update(vars(self))
        copy.start_window()
        return copy

    def __getstate__(self) -> dict[str, Any]:
        """What another process can use."""
        return {"over": self.over, "group": None, "window": None, "_ahead": []}


_open: WeakSet[PairCounts] = WeakSet()  # those that have had something to forget


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for counts in list(_open):
        counts.end_step()


register_optimizer_step_post_hook(_after_step)


class _Ahead:
    """The counts of one pass."""

    def __init__(self, experts: Tensor, counts: Tensor) -> None:
        self.experts, self.counts, self.is_old = experts, counts, False
