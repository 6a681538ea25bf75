"""What all routers have in common: a weight, logits in float32, jitter and the z-loss."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_hybrid.compat import WideBuffers
from lightning_hybrid.functional.routing import Assignment, router_z_loss

Groups = Literal["sequence", "all"]


class Router(WideBuffers, ABC):
    """Decides which tokens go to which experts.

    Logits and all that follows are computed in at least float32, under autocast too (arXiv:2101.03961, section 2.4).
    What is random in a router is so in training only.

    Args:
        dim: D, the width of a token.
        num_experts: E.
        top_k: Experts of each token.
        z_loss: Coefficient of the router z-loss (arXiv:2202.08906, equation 5; 0.001 there).
        jitter: In training, tokens are multiplied by numbers from the uniform distribution over [1 - jitter,
            1 + jitter] before the logits are computed (arXiv:2101.03961, appendix C; 0.01 there).
        groups: Over which tokens an expert's capacity, and what the router itself counts, extends: one "sequence",
            which is the same in every layout, or "all" tokens of a call, which depends on the size of a micro-batch.

    Attributes:
        is_causal: Whether a token's experts depend on that token alone; False also if on later ones.
        weight: [E, D], initialised as that of `nn.Linear`, uniform within 1 / sqrt(D), unless a router says otherwise.

    Raises:
        ValueError: If the arguments do not fit each other.
    """

    is_causal = True

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int = 2,
        *,
        z_loss: float = 0.0,
        jitter: float = 0.0,
        groups: Groups = "all",
    ) -> None:
        super().__init__()
        _check(dim, num_experts, top_k, groups)
        check_coefficients(z_loss=z_loss, jitter=jitter)
        if jitter >= 1:
            raise ValueError(f"jitter={jitter} could turn a token around: give a number below 1, such as 0.01.")
        self.dim, self.num_experts, self.top_k = dim, num_experts, top_k
        self.z_loss, self.jitter, self.groups = z_loss, jitter, groups
        self.weight = nn.Parameter(torch.empty(num_experts, dim))
        self.initialise_weight()

    def reset_parameters(self) -> None:
        """Initialise what the router keeps; a router with more than the weight adds to it."""
        self.initialise_weight()

    def initialise_weight(self) -> None:
        """Initialise the weight."""
        bound = 1 / math.sqrt(self.dim)
        nn.init.uniform_(self.weight, -bound, bound)

    def num_groups(self, num_sequences: int) -> int:
        """How many groups the tokens of a call are, at least 1."""
        return max(num_sequences, 1) if self.groups == "sequence" else 1

    def forward(self, x: Tensor, num_sequences: int = 1) -> Assignment:
        """Decide.

        Args:
            x: [T, D]; T may be 0.
            num_sequences: The tokens are this many sequences of equal length, one after the other.
        """
        with _without_autocast(x.device):
            x = x.to(torch.promote_types(torch.promote_types(x.dtype, self.weight.dtype), torch.float32))
            if self.jitter and self.training:
                x = x * torch.empty_like(x).uniform_(1 - self.jitter, 1 + self.jitter)
            logits = self.project(x, self.weight)
            assignment = self.assign(logits, x, self.num_groups(num_sequences))
            if self.z_loss:
                assignment = assignment.with_losses({"z": self.z_loss * router_z_loss(logits)})
            return assignment

    @staticmethod
    def project(x: Tensor, weight: Tensor) -> Tensor:
        """[T, D] times the transposed [E, D], in the type of `x`."""
        return functional.linear(x, weight.to(x.dtype))

    @abstractmethod
    def assign(self, logits: Tensor, x: Tensor, num_groups: int) -> Assignment:
        """Decide by the logits.

        Args:
            logits: [T, E].
            x: [T, D], after jitter and in the type of the logits.
            num_groups: The tokens are this many equal runs, over which what the router counts extends.
        """

    def extra_repr(self) -> str:
        """What is printed."""
        return f"dim={self.dim}, num_experts={self.num_experts}, top_k={self.top_k}"


def check_coefficients(**coefficients: float) -> None:
    """Refuse what is negative or no number.

    Raises:
        ValueError: Naming it.
    """
    for name, value in coefficients.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}={value} is not a coefficient: give 0, which leaves it out, or a positive number.")


def _check(dim: int, num_experts: int, top_k: int, groups: str) -> None:
    if dim < 1 or num_experts < 1:
        raise ValueError(f"dim={dim} and num_experts={num_experts}: a router needs at least 1 of each.")
    if not 1 <= top_k <= num_experts:
        raise ValueError(
            f"top_k={top_k} experts cannot be chosen of num_experts={num_experts}: give 1 to {num_experts}."
        )
    if groups not in ("sequence", "all"):
        raise ValueError(f'groups={groups!r} is unknown: choose "sequence" or "all".')


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()  # such as the meta device
