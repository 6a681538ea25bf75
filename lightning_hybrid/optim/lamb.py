"""LAMB: Adam's direction with a length for each tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from lightning_hybrid.compat import foreach
from lightning_hybrid.optim.arguments import (
    check_at_least,
    check_fraction,
    check_layerwise,
    check_pair,
    check_range,
)
from lightning_hybrid.optim.base import Member, Request, Update, WholeTensorOptimizer, advance
from lightning_hybrid.optim.norms import adapts, squared_norms, trust, vector_of

FUSED = ("cpu", "cuda", "mps", "xpu")  # where torch makes Adam's step in one pass


class Lamb(WholeTensorOptimizer):
    """Layer-wise adaptive moments for batch training.

    With Adam's moments m and v of a tensor w, corrected for the zeros that they began with::

        u = m / (sqrt(v) + eps) + weight_decay w
        w = w - lr |w| / |u| u

    Norms are those of whole tensors, however they are sharded. The ratio of norms is 1 where either is 0.

    Args:
        params: Parameters or groups.
        lr: Rate: how far a tensor goes in a step, as a part of its own length.
        betas: Decay of the two moments.
        eps: Added to the root.
        weight_decay: Factor of w beside Adam's direction.
        bias_correction: Divide moments by what they lack in the first steps, as the published algorithm does; the third
            preprint does not.
        weight_norm_bounds: A weight's norm counts within them (phi of the paper); None leaves it as it is.
        max_trust_ratio: Limit of the ratio of norms; None sets none.
        adapt: Whether the ratio counts, and is 1 otherwise; None: for tensors of two or more dimensions, not for biases
            and norms, which then go as AdamW lets them. May differ between groups. The paper adapts all (True).

    Raises:
        ValueError: If an option is outside its range.

    Source: You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes (2020), algorithm 2.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        weight_norm_bounds: tuple[float, float] | None = None,
        max_trust_ratio: float | None = None,
        adapt: bool | None = None,
    ) -> None:
        check_at_least(self, 0, lr=lr, eps=eps, weight_decay=weight_decay)
        check_layerwise(self, adapt, max_trust_ratio)
        check_pair(self, betas=betas)
        check_fraction(self, beta1=betas[0], beta2=betas[1])
        if weight_norm_bounds is not None:
            check_pair(self, weight_norm_bounds=weight_norm_bounds)
            if not 0 <= weight_norm_bounds[0] <= weight_norm_bounds[1]:
                raise ValueError(f"Lamb(weight_norm_bounds={weight_norm_bounds}) must be a lower and an upper bound.")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": adapt}
        defaults |= {"bias_correction": bias_correction, "weight_norm_bounds": weight_norm_bounds}
        defaults |= {"max_trust_ratio": max_trust_ratio}
        super().__init__(params, defaults)

    @override
    def update(self, group: dict[str, Any], members: Sequence[Member]) -> Update:
        """As `WholeTensorOptimizer` says."""
        check_range(self, members[0].data.dtype)
        data, lr = [member.data for member in members], float(group["lr"])
        directions = self._directions(group, members)
        if group["weight_decay"]:
            foreach("add_")(directions, data, alpha=group["weight_decay"])
        adapted = [i for i, member in enumerate(members) if adapts(group["adapt"], member.shape)]
        if adapted:
            owners = [members[i] for i in adapted]
            of_data = squared_norms(owners, [data[i] for i in adapted])
            of_directions = squared_norms(owners, [directions[i] for i in adapted])
            weights, lengths = vector_of((yield Request([*of_data, *of_directions]))).sqrt().chunk(2)
            bounded = weights if group["weight_norm_bounds"] is None else weights.clamp(*group["weight_norm_bounds"])
            ratios = trust(bounded, lengths, 1.0, group["max_trust_ratio"], live=weights * lengths)
            ratios = ratios.to(data[0].dtype)
            foreach("mul_")([directions[i] for i in adapted], list(ratios.unbind()))
        foreach("add_")(data, directions, alpha=-lr)

    def _directions(self, group: dict[str, Any], members: Sequence[Member]) -> list[Tensor]:
        """Adam's step of rate -1 from zeros: torch's makes it with the moments, in one pass where it is fused."""
        gradients = [member.gradient for member in members]
        first, second = ([member.entry(name) for member in members] for name in ("exp_avg", "exp_avg_sq"))
        directions = [torch.zeros_like(member.data) for member in members]
        counts = [step - 1 if group["bias_correction"] else math.inf for step in advance(members)]
        device = members[0].data.device
        is_fused = device.type in FUSED and all(t.is_contiguous() for t in (*gradients, *first, *second, *directions))
        place = device if is_fused else "cpu"
        adam(
            directions,
            gradients,
            first,
            second,
            [],
            list(torch.tensor(counts, dtype=torch.float32).to(place, non_blocking=True).unbind()),  # nothing waits
            foreach=not is_fused,
            fused=is_fused,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=-1.0,
            weight_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )
        return directions
