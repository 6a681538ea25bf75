"""Noisy top-k gating with the losses that balance it (Shazeer et al. 2017, arXiv:1701.06538)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lightning_hybrid.functional.routing import Assignment, best_first, first_of_groups, in_choice_order


def noise_deviation(noise_logits: Tensor) -> Tensor:
    """Standard deviation of the noise, softplus(x W_noise) (section 2.1, equation 4).

    It is held at the rounding error of 1 or above: less cannot be seen beside logits, and the load divides by it.

    Args:
        noise_logits: [T, E].
    """
    return functional.softplus(noise_logits).clamp_min(torch.finfo(noise_logits.dtype).eps)


def noisy_top_k(noisy: Tensor, k: int) -> Assignment:
    """Send each token to its k best experts, with the softmax of their k logits (section 2.1, equations 3 and 5).

    Args:
        noisy: [T, E], H = x W_g + draws * noise_deviation, with draws from the standard normal distribution in training
            and 0 in evaluation (equation 4).
        k: At most E.
    """
    chosen = best_first(noisy)[:, :k]
    return in_choice_order(chosen, noisy.gather(1, chosen).softmax(-1), noisy.softmax(-1))


def probability_of_choice(logits: Tensor, noisy: Tensor, deviation: Tensor, k: int) -> Tensor:
    """P(x, i): how probably expert i is chosen if its own noise alone is drawn anew (appendix A, equations 8 and 9).

    Args:
        logits: [T, E], x W_g.
        noisy: [T, E], H.
        deviation: [T, E], of the noise.
        k: At most E. If all are chosen, the probability is 1.

    Returns:
        [T, E].
    """
    if k == logits.shape[1]:
        return torch.ones_like(logits)
    order = best_first(noisy)
    is_chosen = torch.zeros_like(noisy, dtype=torch.bool).scatter(1, order[:, :k], True)
    last, next_best = noisy.gather(1, order[:, k - 1 : k + 1]).split(1, dim=1)
    kth_excluding = torch.where(is_chosen, next_best, last)
    return torch.special.ndtr((logits - kth_excluding) / deviation)


def importance(assignment: Assignment, num_groups: int = 1) -> Tensor:
    """Sum of each expert's weights over each group of tokens (section 4, equation 6).

    Returns:
        [num_groups, E].
    """
    gates = torch.zeros_like(assignment.probabilities)
    gates = gates.index_put((assignment.tokens, assignment.experts), assignment.weights)
    return sums_of_groups(gates, num_groups)


def sums_of_groups(values: Tensor, num_groups: int) -> Tensor:
    """Sums of [T, E] over each of the equal runs of tokens, [num_groups, E]."""
    first_of_groups(len(values), num_groups, values.device)
    return values.view(num_groups, len(values) // num_groups, values.shape[1]).sum(1)


def squared_variation(values: Tensor) -> Tensor:
    """Squared coefficient of variation over the experts, the mean over groups (section 4, equation 7; appendix A, 11).

    Args:
        values: [num_groups, E], importance or load, at least 0.

    Returns:
        A scalar: variance (of all E, without a correction) over squared mean; 0 for a group of zeros.
    """
    mean = values.mean(-1)
    mean = torch.where(mean == 0, torch.ones_like(mean), mean)
    return (values.var(-1, correction=0) / mean.square()).mean()
