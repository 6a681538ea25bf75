"""Kronecker factors of the Fisher matrix, their inverses, and the natural gradient that they give.

The Fisher matrix of a layer is approximated by A (x) G: A is the mean of outer products of its inputs, G of its
slopes, which are gradients with respect to its outputs (Martens and Grosse 2015, arXiv:1503.05671, section 3). Here A
belongs to the columns of a weight (outputs, inputs), with one more for the bias, and G to its rows. A layer whose A is
diagonal, as an embedding's, has it as a vector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Inverse(NamedTuple):
    """What a damped factor is inverted by.

    Attributes:
        values: The inverse of shape (n, n), or, of a diagonal factor, its diagonal (n,); or eigenvalues (n,) if
            `vectors` is there or the factor is diagonal.
        vectors: Eigenvectors in columns (n, n); empty without.
    """

    values: Tensor
    vectors: Tensor


def averaging(count: int, decay: float) -> float:
    """Weight of the past in a running mean: min(1 - 1/k, decay), so that its beginning is a plain mean.

    Source: Martens and Grosse 2015, section 5.

    Args:
        count: k, how many have been taken in with this one, from 1.
        decay: Its largest value.
    """
    return min(1.0 - 1.0 / count, decay)


def split_damping(first: Tensor, second: Tensor, damping: float) -> tuple[float, float]:
    """What is added to the diagonals of A and G: pi sqrt(damping) and sqrt(damping) / pi.

    pi^2 is the ratio of the means of their eigenvalues; without any in one of them it is 1.

    Source: Martens and Grosse 2015, section 6.3.

    Args:
        first: A, of shape (n, n) or (n,).
        second: G, of shape (m, m) or (m,).
        damping: Above 0.
    """
    means = [float(diagonal_of(factor).double().mean()) for factor in (first, second)]
    ratio = means[0] / means[1] if min(means) > 0 else 1.0
    ratio = math.sqrt(ratio) if math.isfinite(ratio) and ratio > 0 else 1.0
    return ratio * math.sqrt(damping), math.sqrt(damping) / ratio


def diagonal_of(factor: Tensor) -> Tensor:
    """The diagonal of a factor, of which a vector is all."""
    return factor if factor.ndim == 1 else factor.diagonal()


def inverted(factor: Tensor, shift: float) -> Inverse | None:
    """The inverse of factor + shift I; None if that is not positive definite.

    Args:
        factor: Symmetric, of shape (n, n), or a diagonal (n,).
        shift: What is added to its diagonal.
    """
    none = factor.new_empty(0)
    if factor.ndim == 1:
        shifted = factor + shift
        return Inverse(shifted.reciprocal(), none) if bool((shifted > 0).all()) else None
    shifted = factor.clone()
    shifted.diagonal().add_(shift)
    triangle, info = torch.linalg.cholesky_ex(shifted)
    if int(info) or not bool(triangle.isfinite().all()):
        return None
    return Inverse(torch.cholesky_inverse(triangle), none)


def decomposed(factor: Tensor, shift: float) -> Inverse | None:
    """Eigenvalues, not below 0, and eigenvectors of a factor; None if it has none, or not above -shift.

    Args:
        factor: Symmetric, of shape (n, n), or a diagonal (n,).
        shift: What rounding may have taken from its eigenvalues.
    """
    if not bool(factor.isfinite().all()):
        return None
    try:
        values, vectors = (factor, factor.new_empty(0)) if factor.ndim == 1 else torch.linalg.eigh(factor)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # it has not converged
        return None
    return Inverse(values.clamp(min=0), vectors) if float(values.min()) + shift > 0 else None


def precondition(gradient: Tensor, first: Inverse, second: Inverse, damping: float | None) -> Tensor:
    """The natural gradient of a layer.

    Without `damping` it is (G + g I)^-1 V (A + a I)^-1, by inverses that have it. With `damping` it is
    (A (x) G + damping I)^-1 V, in the basis of eigenvectors (George et al. 2018, arXiv:1806.03884, section 3).

    Args:
        gradient: V, of shape (rows of G, rows of A).
        first: Of A.
        second: Of G.
        damping: With eigenvectors; None with inverses.
    """
    if damping is None:
        right = gradient * first.values if first.values.ndim == 1 else gradient @ first.values
        return second.values @ right
    turned = second.vectors.T @ gradient
    turned = turned @ first.vectors if first.vectors.numel() else turned
    turned = turned / (torch.outer(second.values, first.values) + damping)
    turned = turned @ first.vectors.T if first.vectors.numel() else turned
    return second.vectors @ turned


def clipping_factor(product: float, kl_clip: float | None) -> float:
    """What a step is multiplied by: min(1, sqrt(kl_clip / product)).

    Source: Ba, Grosse and Martens 2017, "Distributed second-order optimization using Kronecker-factored
    approximations", ICLR 2017.

    Args:
        product: lr^2 times the product of gradient and natural gradient, over all layers.
        kl_clip: Largest change of the model's distribution in a step, by that estimate; None sets no limit.
    """
    return 1.0 if kl_clip is None or not product > kl_clip else math.sqrt(kl_clip / product)


def deal_out(costs: Sequence[float], number: int) -> list[int]:
    """Who does which task: the dearest first, each to who has least so far.

    Source: Graham 1969, "Bounds on multiprocessing timing anomalies": at most 4/3 - 1/(3 number) of the best.

    Args:
        costs: Of the tasks.
        number: Of workers.

    Returns:
        For each task its worker, from 0.
    """
    loads, owners = [0.0] * number, [0] * len(costs)
    for task in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        owners[task] = loads.index(min(loads))
        loads[owners[task]] += costs[task]
    return owners
