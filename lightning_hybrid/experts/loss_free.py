"""Balance without a loss: a bias that moves after each optimizer step, under any strategy and under none."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from lightning_hybrid.compat import in_backward
from lightning_hybrid.experts.router import Groups, Router, check_coefficients
from lightning_hybrid.functional.routing import Assignment, balanced_bias, counts_of, loss_free
from lightning_hybrid.parallel.experts.counting import sums_over

Scores = Literal["sigmoid", "softmax"]


class LossFree(Router):
    """The k experts of the largest scores plus a bias that balances them, see `functional.routing.loss_free`.

    Each forward in training counts the pairs of each expert, and after the next step of any optimizer the bias goes up
    by `speed` where an expert had less than the mean, and down where more. Forwards in evaluation and the recomputation
    of activation checkpoints do not count; all micro-batches of an accumulation window do, and where a step is skipped,
    its counts go to the next one. If two optimizers step after one forward, the first one takes the counts.

    Args:
        dim: As for all routers.
        num_experts: As for all routers.
        top_k: As for all routers.
        speed: By how much a bias moves in a step (u in arXiv:2408.15664).
        scores: "sigmoid" (DeepSeek-V3) or "softmax" of the logits.
        renormalize: Divide a token's weights by their sum (DeepSeek-V3); arXiv:2408.15664 does not.
        z_loss: As for all routers.
        jitter: As for all routers.
        groups: As for all routers.

    Attributes:
        bias: [E], a buffer that is saved, float32 or wider whatever the model is cast to.
        counts: [E], int64, of the forwards since the last step; None without any.
        name: Orders the routers of a balance group, the same on all ranks of it; of equal names, the one comes first
            that first was given a group or ran in training. `share_counts` sets it.
        reduces: False while a strategy runs passes that train nothing, which do not count.
    """

    bias: Tensor

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int = 2,
        *,
        speed: float = 0.001,
        scores: Scores = "sigmoid",
        renormalize: bool = True,
        z_loss: float = 0.0,
        jitter: float = 0.0,
        groups: Groups = "all",
    ) -> None:
        super().__init__(dim, num_experts, top_k, z_loss=z_loss, jitter=jitter, groups=groups)
        check_coefficients(speed=speed)
        if scores not in ("sigmoid", "softmax"):
            raise ValueError(f'scores={scores!r} is unknown: choose "sigmoid" or "softmax".')
        self.speed, self.scores, self.renormalize = speed, scores, renormalize
        self.register_buffer("bias", torch.zeros(num_experts, dtype=torch.float32))
        self.name, self.reduces = "", True
        self.counts: Tensor | None = None
        self._group: ProcessGroup | None = None

    def reset_parameters(self) -> None:
        """Initialise the weight, and set the bias to 0."""
        super().reset_parameters()
        torch.nn.init.zeros_(self.bias)

    @property
    def balance_group(self) -> ProcessGroup | None:
        """Ranks whose counts are summed, see `share_counts`; None: each process balances over what it has."""
        return self._group

    @balance_group.setter
    def balance_group(self, group: ProcessGroup | None) -> None:
        self._group = group
        if group is not None:
            _join(self)

    def start_window(self) -> None:
        """An accumulation window begins, as a strategy tells: the counts of a step that was skipped stay."""

    @property
    def counts_windows(self) -> bool:
        """Counts belong to a window."""
        return True

    def window_counts(self, *, first: bool) -> Tensor:
        """Those of this rank since the last step, [E]."""
        return _counts_of(self)

    def resume_window(self, counts: Tensor, *, first: bool) -> None:
        """Go on from the sum over all ranks, which the first of them takes."""
        self.counts = counts if first else None

    def assign(self, logits: Tensor, x: Tensor, num_groups: int) -> Assignment:
        """Decide by the logits, as `Router.assign` says."""
        scores = logits.sigmoid() if self.scores == "sigmoid" else logits.softmax(-1)
        assignment = loss_free(scores, self.bias, self.top_k, self.renormalize)
        _count(self, assignment.experts)
        return assignment

    def balance(self, counts: Tensor) -> None:
        """Move the bias by counts of all ranks, and start to count anew."""
        with torch.no_grad():
            self.bias.copy_(balanced_bias(self.bias, counts, self.speed))
        self.counts = None

    def __getstate__(self) -> dict[str, Any]:
        """Without a group, which cannot be copied, and without the counts, which are of this router's own forwards."""
        return {**self.__dict__, "_group": None, "counts": None}


def share_counts(module: nn.Module, group: ProcessGroup | None) -> None:
    """Sum the counts of all `LossFree` routers of a module over a group, or no longer.

    From then on they all take part in one sum at each step of any optimizer, whether they ran or not, until the group
    is None again: that must be so at the end of training, on all ranks alike. A model that waits for Python's garbage
    collector would still take part, on some ranks longer than on others.

    Args:
        module: The same on all ranks, for the names in it.
        group: The ranks that hold replicas; None: each process balances over what it has.
    """
    for name, router in module.named_modules():
        if isinstance(router, LossFree):
            router.name, router.balance_group = name, group


_numbers = count()
_joined: WeakKeyDictionary[LossFree, int] = WeakKeyDictionary()  # those that may have counts, in the order they came


def _join(router: LossFree) -> None:
    if router not in _joined:
        _joined[router] = next(_numbers)


def _count_as_written(router: LossFree, experts: Tensor) -> None:
    if router.training and router.reduces and not in_backward():  # in backward it is a recomputation
        _join(router)
        counts = counts_of(experts, router.num_experts)
        router.counts = counts if router.counts is None else router.counts + counts


# compiled code would neither see a backward pass nor keep what it adds to
_count = torch.compiler.disable(_count_as_written)


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    routers = sorted(_joined, key=lambda router: (router.name, _joined[router]))
    for router in routers:
        counts = _pending(router)
        if router.balance_group is None and counts is not None:
            router.balance(counts)
    for group in _groups(routers):
        members = [router for router in routers if router.balance_group is group]
        for router, counts in zip(members, sums_over(group, map(_counts_of, members)), strict=True):
            router.balance(counts)


def _groups(routers: Iterable[LossFree]) -> list[ProcessGroup]:
    """Each group once, in the order in which the routers name them."""
    return list(dict.fromkeys(r.balance_group for r in routers if r.balance_group is not None))


def _pending(router: LossFree) -> Tensor | None:
    """The counts, also where a pipeline has made what blocks of other stages set on themselves unreadable."""
    counts: Tensor | None = vars(router)["counts"]
    return counts


def _counts_of(router: LossFree) -> Tensor:
    counts = _pending(router)
    return torch.zeros(router.num_experts, dtype=torch.int64, device=router.bias.device) if counts is None else counts


register_optimizer_step_post_hook(_after_step)
