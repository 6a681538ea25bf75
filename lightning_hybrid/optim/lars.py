"""LARS: momentum SGD with a rate for each tensor, so that large batches do not need their own."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from lightning_hybrid.compat import foreach
from lightning_hybrid.optim.arguments import check_at_least, check_fraction, check_layerwise
from lightning_hybrid.optim.base import Member, Request, Update, WholeTensorOptimizer
from lightning_hybrid.optim.norms import adapts, squared_norms, trust, vector_of


class Lars(WholeTensorOptimizer):
    """Layer-wise adaptive rate scaling.

    For a tensor w with gradient g::

        ratio = trust_coefficient |w| / (|g| + weight_decay |w|)
        v = momentum v + lr ratio (g + weight_decay w)
        w = w - v

    The rate is inside the buffer, as in the paper: when it changes, past gradients keep the rate of their own step,
    unless `LearningRateScaling` corrects the momentum.
    Norms are those of whole tensors, however they are sharded. The ratio is 1 where either norm is 0.

    Args:
        params: Parameters or groups.
        lr: Rate.
        momentum: From 0 to below 1.
        weight_decay: Factor of w beside the gradient.
        trust_coefficient: The part of its own length that a tensor goes at a rate of 1, without momentum.
        max_trust_ratio: Limit of the ratio; None sets none.
        adapt: Whether the ratio counts, and is 1 otherwise; None: for tensors of two or more dimensions, not for biases
            and norms. May differ between groups. What decays is `weight_decay`'s alone, see `WeightDecayRules`.
        nesterov: Look ahead: w goes by momentum v + lr ratio (g + weight_decay w), with the new v.

    Raises:
        ValueError: If an option is outside its range.

    Attributes:
        rate_in_momentum: True, which `LearningRateScaling` asks for.

    Source: You, Gitman and Ginsburg, Large Batch Training of Convolutional Networks (2017), algorithm 1.
    """

    rate_in_momentum = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        max_trust_ratio: float | None = None,
        adapt: bool | None = None,
        nesterov: bool = False,
    ) -> None:
        check_at_least(self, 0, lr=lr, weight_decay=weight_decay, trust_coefficient=trust_coefficient)
        check_layerwise(self, adapt, max_trust_ratio)
        check_fraction(self, momentum=momentum)
        if nesterov and not momentum:
            raise ValueError("Lars(nesterov=True) looks ahead along its momentum, which is 0. Set momentum above 0.")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "adapt": adapt, "nesterov": nesterov}
        defaults |= {"trust_coefficient": trust_coefficient, "max_trust_ratio": max_trust_ratio}
        super().__init__(params, defaults)

    @override
    def update(self, group: dict[str, Any], members: Sequence[Member]) -> Update:
        """As `WholeTensorOptimizer` says."""
        lr, momentum = float(group["lr"]), group["momentum"]
        data, gradients = [member.data for member in members], [member.gradient for member in members]
        rates = yield from self._rates(group, members)
        if group["weight_decay"]:
            scaled = foreach("add")(gradients, data, alpha=group["weight_decay"])
            foreach("mul_")(scaled, rates)
        else:
            scaled = foreach("mul")(gradients, rates)
        if not momentum:
            foreach("add_")(data, scaled, alpha=-lr)
            return
        buffers = [member.entry("momentum_buffer") for member in members]
        foreach("mul_")(buffers, momentum)
        foreach("add_")(buffers, scaled, alpha=lr)
        foreach("add_")(data, buffers, alpha=-momentum if group["nesterov"] else -1.0)
        if group["nesterov"]:
            foreach("add_")(data, scaled, alpha=-lr)

    def _rates(
        self, group: dict[str, Any], members: Sequence[Member]
    ) -> Generator[Request, list[Tensor], list[Tensor]]:
        """The ratio of each member, as scalars."""
        adapted = [member for member in members if adapts(group["adapt"], member.shape)]
        one = torch.ones((), dtype=members[0].data.dtype, device=members[0].data.device)
        rates = dict.fromkeys(map(id, members), one)
        if adapted:
            of_data = squared_norms(adapted, [member.data for member in adapted])
            of_gradients = squared_norms(adapted, [member.gradient for member in adapted])
            weights, gradients = vector_of((yield Request([*of_data, *of_gradients]))).sqrt().chunk(2)
            divisor = gradients + group["weight_decay"] * weights
            ratios = trust(weights, divisor, group["trust_coefficient"], group["max_trust_ratio"], live=gradients)
            rates |= dict(zip(map(id, adapted), ratios.to(one.dtype).unbind(), strict=True))
        return [rates[id(member)] for member in members]
