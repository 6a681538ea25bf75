"""Routers as modules: each leaves its equations to a pure function. `make_router` knows them by name."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.experts.loss_free import LossFree
from lightning_hybrid.experts.router import Groups, Router, check_coefficients
from lightning_hybrid.functional import noisy_routing, routing
from lightning_hybrid.functional.routing import Assignment


class TopK(Router):
    """The k experts of the largest probabilities, see `functional.routing.top_k`.

    Args:
        dim: As for all routers.
        num_experts: As for all routers.
        top_k: As for all routers.
        renormalize: Divide a token's weights by their sum, as Mixtral does (arXiv:2401.04088, section 2.1); OLMoE
            (arXiv:2409.02060) does not.
        z_loss: As for all routers.
        jitter: As for all routers.
        groups: As for all routers.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int = 2,
        *,
        renormalize: bool = True,
        z_loss: float = 0.0,
        jitter: float = 0.0,
        groups: Groups = "all",
    ) -> None:
        super().__init__(dim, num_experts, top_k, z_loss=z_loss, jitter=jitter, groups=groups)
        self.renormalize = renormalize

    def assign(self, logits: Tensor, x: Tensor, num_groups: int) -> Assignment:
        """Decide by the logits, as `Router.assign` says."""
        return routing.top_k(logits, self.top_k, self.renormalize)


class NoisyTopK(Router):
    """The k experts of the largest logits with noise, see `functional.noisy_routing` (arXiv:1701.06538).

    Args:
        dim: As for all routers.
        num_experts: As for all routers.
        top_k: As for all routers.
        importance_loss: Coefficient of the squared variation of the experts' summed weights (0.1 in the paper).
        load_loss: Coefficient of the squared variation of their expected number of tokens (0.1 in the paper).
        z_loss: As for all routers, of the logits without noise.
        jitter: As for all routers.
        groups: As for all routers; with "sequence", both losses are means over what each sequence gives.

    Attributes:
        weight: [E, D], zeros at first, as is `noise_weight` (appendix A): the noise alone decides.
        noise_weight: [E, D].
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int = 2,
        *,
        importance_loss: float = 0.1,
        load_loss: float = 0.1,
        z_loss: float = 0.0,
        jitter: float = 0.0,
        groups: Groups = "all",
    ) -> None:
        super().__init__(dim, num_experts, top_k, z_loss=z_loss, jitter=jitter, groups=groups)
        check_coefficients(importance_loss=importance_loss, load_loss=load_loss)
        self.importance_loss, self.load_loss = importance_loss, load_loss
        self.noise_weight = nn.Parameter(torch.zeros(num_experts, dim))

    def initialise_weight(self) -> None:
        """Set the weight to 0."""
        nn.init.zeros_(self.weight)

    def reset_parameters(self) -> None:
        """Set both weights to 0."""
        super().reset_parameters()
        nn.init.zeros_(self.noise_weight)

    def assign(self, logits: Tensor, x: Tensor, num_groups: int) -> Assignment:
        """Decide by the logits, as `Router.assign` says."""
        deviation = noisy_routing.noise_deviation(self.project(x, self.noise_weight))
        noisy = logits + torch.randn_like(logits) * deviation if self.training else logits
        assignment = noisy_routing.noisy_top_k(noisy, self.top_k)
        losses = {}
        if self.importance_loss:
            sums = noisy_routing.importance(assignment, num_groups)
            losses["importance"] = self.importance_loss * noisy_routing.squared_variation(sums)
        if self.load_loss:
            chosen = noisy_routing.probability_of_choice(logits, noisy, deviation, self.top_k)
            sums = noisy_routing.sums_of_groups(chosen, num_groups)
            losses["load"] = self.load_loss * noisy_routing.squared_variation(sums)
        return assignment.with_losses(losses)


class Switch(Router):
    """The best expert, weighted by its probability, see `functional.routing.switch` (arXiv:2101.03961).

    Args:
        dim: As for all routers.
        num_experts: As for all routers.
        top_k: 1.
        z_loss: As for all routers.
        jitter: As for all routers.
        groups: As for all routers.

    Attributes:
        weight: [E, D], from a normal distribution cut off at two standard deviations of sqrt(0.1 / D) (section 2.4).
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int = 1,
        *,
        z_loss: float = 0.0,
        jitter: float = 0.0,
        groups: Groups = "all",
    ) -> None:
        _demand(top_k, 1, "switch")
        super().__init__(dim, num_experts, top_k, z_loss=z_loss, jitter=jitter, groups=groups)

    def initialise_weight(self) -> None:
        """Draw the weight."""
        deviation = math.sqrt(0.1 / self.dim)
        nn.init.trunc_normal_(self.weight, std=deviation, a=-2 * deviation, b=2 * deviation)

    def assign(self, logits: Tensor, x: Tensor, num_groups: int) -> Assignment:
        """Decide by the logits, as `Router.assign` says."""
        return routing.switch(logits)


class GShard(Router):
    """The best expert, and in training by chance the second one, see `functional.routing.gshard` (arXiv:2006.16668).

    In evaluation each token goes to both.

    Args:
        dim: As for all routers.
        num_experts: As for all routers, at least 2.
        top_k: 2.
        z_loss: As for all routers.
        jitter: As for all routers.
        groups: As for all routers; a "sequence" is the paper's local group.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int = 2,
        *,
        z_loss: float = 0.0,
        jitter: float = 0.0,
        groups: Groups = "sequence",
    ) -> None:
        _demand(top_k, 2, "gshard")
        super().__init__(dim, num_experts, top_k, z_loss=z_loss, jitter=jitter, groups=groups)

    def assign(self, logits: Tensor, x: Tensor, num_groups: int) -> Assignment:
        """Decide by the logits, as `Router.assign` says."""
        chances = torch.rand_like(logits[:, 0]) if self.training else torch.zeros_like(logits[:, 0])
        return routing.gshard(logits, chances)


class ExpertChoice(Router):
    """Each expert takes its best tokens, see `functional.routing.expert_choice` (arXiv:2202.09368).

    Each takes n * c / E of a group of n tokens, rounded down, but at least 1, with c = top_k * capacity_factor.

    What a token gets depends on later tokens of its group: in a causal model that is a look into the future, and when
    text is made token by token, each expert takes the only token there is.

    Args:
        dim: As for all routers.
        num_experts: As for all routers.
        top_k: Experts of a token in the mean (2 in the paper).
        capacity_factor: Above 0, for means that are not whole numbers.
        z_loss: As for all routers.
        jitter: As for all routers.
        groups: As for all routers; here also the tokens among which an expert chooses.
    """

    is_causal = False

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int = 2,
        *,
        capacity_factor: float = 1.0,
        z_loss: float = 0.0,
        jitter: float = 0.0,
        groups: Groups = "sequence",
    ) -> None:
        super().__init__(dim, num_experts, top_k, z_loss=z_loss, jitter=jitter, groups=groups)
        routing.capacity_of(1, num_experts, top_k, capacity_factor)  # refuses a factor that is none
        self.capacity_factor = capacity_factor

    def assign(self, logits: Tensor, x: Tensor, num_groups: int) -> Assignment:
        """Decide by the logits, as `Router.assign` says."""
        tokens = len(logits) // num_groups
        capacity = routing.capacity_of(tokens, self.num_experts, self.top_k, self.capacity_factor)
        return routing.expert_choice(logits, capacity, num_groups)


ROUTERS: dict[str, type[Router]] = {
    "topk": TopK,
    "noisy_topk": NoisyTopK,
    "switch": Switch,
    "gshard": GShard,
    "expert_choice": ExpertChoice,
    "loss_free": LossFree,
}


def make_router(
    name: str,
    dim: int,
    num_experts: int,
    *,
    top_k: int | None = None,
    z_loss: float = 0.0,
    jitter: float = 0.0,
    groups: Groups | None = None,
) -> Router:
    """Make a router by its name.

    Args:
        name: "topk", "noisy_topk", "switch", "gshard", "expert_choice" or "loss_free".
        dim: As for all routers.
        num_experts: As for all routers.
        top_k: As for all routers; None: the router's own default.
        z_loss: As for all routers.
        jitter: As for all routers.
        groups: As for all routers; None: the router's own default.

    Raises:
        ValueError: If there is no such router, or the arguments do not fit it.
    """
    if name not in ROUTERS:
        raise ValueError(f"router={name!r} is unknown: choose one of {', '.join(ROUTERS)}, or give a Router.")
    chosen: dict[str, Any] = {"top_k": top_k, "groups": groups}
    given = {key: value for key, value in chosen.items() if value is not None}
    return ROUTERS[name](dim, num_experts, z_loss=z_loss, jitter=jitter, **given)


def _demand(top_k: int, only: int, name: str) -> None:
    if top_k != only:
        raise ValueError(
            f'top_k={top_k} does not fit the router "{name}", which chooses {only}: give top_k={only}, or use "topk".'
        )
