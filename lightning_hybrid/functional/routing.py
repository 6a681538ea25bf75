"""Which tokens go to which experts: routers as pure functions, and which pairs stay within the capacity.

Of equal scores, the expert or token of the lowest number comes first, so that all layouts choose alike. A score that
is not a number comes before all others, and chooses an expert that exists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

Rounding = Literal["floor", "ceil"]


@dataclass(frozen=True)
class Assignment:
    """What a router has decided for T tokens and E experts: P pairs of a token and an expert.

    Attributes:
        tokens: [P], int64. Pairs are in the order in which they may take an expert's capacity.
        experts: [P], int64.
        weights: [P], by which an expert's output counts; with a gradient to the router.
        probabilities: [T, E], with a gradient: what a balance loss multiplies the fractions of tokens with.
        losses: Losses of the router itself by name ("importance", "load", "z"), scalars times their coefficients.
    """

    tokens: Tensor
    experts: Tensor
    weights: Tensor
    probabilities: Tensor
    losses: Mapping[str, Tensor] = field(default_factory=dict)

    def with_losses(self, losses: Mapping[str, Tensor]) -> Assignment:
        """The same with more losses."""
        return replace(self, losses={**self.losses, **losses})


def best_first(scores: Tensor) -> Tensor:
    """Numbers of the last dimension by falling score, equal ones by number; `torch.topk` promises no such order."""
    return scores.argsort(dim=-1, descending=True, stable=True)


def in_choice_order(chosen: Tensor, weights: Tensor, probabilities: Tensor) -> Assignment:
    """Pairs of all tokens' first choices, then of all second ones, as GShard and Switch hand out capacity.

    Args:
        chosen: [T, k], experts, each token's best first.
        weights: [T, k].
        probabilities: [T, E].
    """
    num_tokens, top_k = chosen.shape
    tokens = torch.arange(num_tokens, device=chosen.device).repeat(top_k)
    return Assignment(tokens, chosen.T.reshape(-1), weights.T.reshape(-1), probabilities)


def share_of_sum(weights: Tensor) -> Tensor:
    """Weights over their sum along the last dimension; zeros where all of them have underflowed to 0."""
    return weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


def top_k(logits: Tensor, k: int, renormalize: bool) -> Assignment:
    """Send each token to its k best experts, by the probabilities of a softmax over all of them.

    Args:
        logits: [T, E].
        k: At most E.
        renormalize: Divide a token's k weights by their sum, which is a softmax over the chosen (Mixtral,
            arXiv:2401.04088, section 2.1); else they are the probabilities (OLMoE, arXiv:2409.02060, section 2).
    """
    chosen = best_first(logits)[:, :k]
    probabilities = logits.softmax(-1)
    weights = logits.gather(1, chosen).softmax(-1) if renormalize else probabilities.gather(1, chosen)
    return in_choice_order(chosen, weights, probabilities)


def switch(logits: Tensor) -> Assignment:
    """Send each token to its best expert, weighted by its probability (arXiv:2101.03961, section 2.1, equations 1, 2).

    Args:
        logits: [T, E].
    """
    return top_k(logits, 1, renormalize=False)


def gshard(logits: Tensor, chances: Tensor) -> Assignment:
    """Send each token to its best expert, and by chance to its second one (arXiv:2006.16668, section 2.2, algorithm 1).

    With g1 and g2 the two largest probabilities divided by their sum, the second pair exists where 2 * g2 > chance. One
    that does not takes no capacity, as in the authors' code; the algorithm as printed counts it.

    Args:
        logits: [T, E], with E of at least 2.
        chances: [T], uniform in [0, 1); zeros keep every second expert whose weight is not 0.
    """
    both = top_k(logits, 2, renormalize=True)
    is_kept = torch.cat([torch.ones_like(chances, dtype=torch.bool), 2 * both.weights[len(chances) :] > chances])
    return Assignment(both.tokens[is_kept], both.experts[is_kept], both.weights[is_kept], both.probabilities)


def expert_choice(logits: Tensor, capacity: int, num_groups: int = 1) -> Assignment:
    """Let each expert take the tokens most probable for it (arXiv:2202.09368, section 3.2, equation 1).

    Args:
        logits: [T, E].
        capacity: k, how many tokens an expert takes of each group; of a smaller group, all.
        num_groups: The T tokens are this many equal runs, of which no expert compares tokens of different ones.

    Returns:
        Pairs of all experts' first choices, then of all second ones. A token may be in no pair, or in E.
    """
    num_tokens, num_experts = logits.shape
    first = first_of_groups(num_tokens, num_groups, logits.device)
    probabilities = logits.softmax(-1)
    by_expert = probabilities.view(num_groups, num_tokens // num_groups, num_experts).transpose(1, 2)
    chosen = best_first(by_expert)[:, :, :capacity]  # [groups, E, k]
    weights = by_expert.gather(2, chosen)
    experts = torch.arange(num_experts, device=logits.device).expand(chosen.shape[2], num_groups, num_experts)
    tokens = (chosen + first[:, None, None]).permute(2, 0, 1)
    return Assignment(tokens.reshape(-1), experts.reshape(-1), weights.permute(2, 0, 1).reshape(-1), probabilities)


def loss_free(scores: Tensor, bias: Tensor, k: int, renormalize: bool) -> Assignment:
    """Choose k experts by score plus bias, and weight them by score (arXiv:2408.15664, section 3, equation 3).

    Args:
        scores: [T, E], at least 0: sigmoids or a softmax of the logits.
        bias: [E], without a gradient.
        k: At most E.
        renormalize: Divide a token's k weights by their sum (DeepSeek-V3, arXiv:2412.19437, equation 13).

    Returns:
        The probabilities are the scores over their sum (DeepSeek-V3, equation 19).
    """
    chosen = best_first(scores.detach() + bias)[:, :k]
    weights = scores.gather(1, chosen)
    weights = share_of_sum(weights) if renormalize else weights
    return in_choice_order(chosen, weights, share_of_sum(scores))


def balanced_bias(bias: Tensor, counts: Tensor, speed: float) -> Tensor:
    """The bias after a step: plus `speed` where an expert got less than the mean, minus where more.

    Source: arXiv:2408.15664, section 3, algorithm 1. Integers are compared, so that a mean is met exactly.

    Args:
        bias: [E].
        counts: [E], integers: how many pairs each expert was in since the last step.
        speed: u, 0.001 in the paper.
    """
    return bias + speed * (counts.sum() - len(counts) * counts).sign()


def router_z_loss(logits: Tensor) -> Tensor:
    """Mean over the tokens of the squared log-sum-exp of their logits (ST-MoE, arXiv:2202.08906, equation 5).

    Args:
        logits: [T, E].

    Returns:
        A scalar, 0 without tokens.
    """
    return logits.logsumexp(-1).square().sum() / max(len(logits), 1)


def capacity_of(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    factor: float,
    rounding: Rounding = "floor",
    minimum: int = 1,
) -> int:
    """How many tokens an expert takes: factor * num_tokens * top_k / num_experts, rounded, and at least `minimum`.

    Switch (arXiv:2101.03961, section 2.2, equation 3) has top_k = 1. The factor counts as the decimal number that it is
    printed as: in floats, 1.1 * 50 is 55.00000000000001, and rounded up 56.

    Args:
        num_tokens: Of the group whose tokens share the capacity.
        num_experts: At least 1.
        top_k: Experts of each token.
        factor: Above 0.
        rounding: "floor" or "ceil".
        minimum: At least 0, which lets a caller refuse a capacity of 0.

    Raises:
        ValueError: If the factor is not a positive number, the rounding is another word, or the minimum is below 0.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise ValueError(f"capacity_factor={factor} is no capacity: give a number above 0, or None to drop no token.")
    if rounding not in ("floor", "ceil"):
        raise ValueError(f'rounding={rounding!r} is unknown: choose "floor" or "ceil".')
    if minimum < 0:
        raise ValueError(f"minimum={minimum} is no number of tokens: give at least 1, so that each expert takes one.")
    exact = Fraction(str(factor)) * num_tokens * top_k / num_experts
    return max(math.floor(exact) if rounding == "floor" else math.ceil(exact), minimum)


def keep_first(assignment: Assignment, num_experts: int, capacity: int, num_groups: int = 1) -> Tensor:
    """Which pairs stay when each expert takes the first `capacity` pairs of each group of tokens.

    Args:
        assignment: Pairs in order of priority.
        num_experts: E.
        capacity: Of one expert in one group.
        num_groups: The T tokens are this many equal runs, each with a capacity of its own (GShard's local groups,
            arXiv:2006.16668, section 2.2).

    Returns:
        [P], bool.
    """
    first = first_of_groups(len(assignment.probabilities), num_groups, assignment.tokens.device)
    groups = torch.searchsorted(first, assignment.tokens, right=True) - 1
    queues = groups * num_experts + assignment.experts
    queues, order = queues.sort(stable=True)
    places = torch.arange(len(queues), device=queues.device) - torch.searchsorted(queues, queues)
    return torch.empty_like(queues, dtype=torch.bool).scatter_(0, order, places < capacity)


def counts_of(numbers: Tensor, size: int) -> Tensor:
    """How often each number from 0 to size - 1 is there; `torch.bincount` makes a GPU wait.

    Args:
        numbers: [P], int64.
        size: Of what is returned, [size].
    """
    return numbers.new_zeros(size).scatter_add_(0, numbers, torch.ones_like(numbers))


def first_of_groups(num_tokens: int, num_groups: int, device: torch.device) -> Tensor:
    """The first token of each group, where the tokens are equal runs.

    Raises:
        ValueError: If they cannot be equal.
    """
    if num_groups < 1 or num_tokens % num_groups:
        raise ValueError(f"{num_tokens} tokens are not {num_groups} equal groups: give sequences of one length.")
    return torch.arange(num_groups, device=device) * (num_tokens // num_groups)
