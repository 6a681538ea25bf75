"""How noisy gradients are, from those of parts of a batch and that of the whole; what batch size follows from it.

With the mean gradient ``G`` over all data and the covariance ``Sigma`` of one sample's, the gradient of ``b`` samples
has the mean ``G`` and the covariance ``Sigma / b``. Source: McCandlish et al. 2018, arXiv:1812.06162, section 2.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple


class GradientSums(NamedTuple):
    """What the estimates need to know of a step's small gradients ``g_i``, of ``b_i`` samples each.

    Their sum with weights ``w_i`` is the step's gradient. Those without weight do not count.

    Attributes:
        number: How many there are.
        weight: Sum of ``w_i``.
        squares: Sum of ``w_i |g_i|^2``.
        inverses: Sum of ``w_i / b_i``.
        variance: Sum of ``w_i^2 / b_i``.
    """

    number: float = 0.0
    weight: float = 0.0
    squares: float = 0.0
    inverses: float = 0.0
    variance: float = 0.0

    @classmethod
    def of(cls, rows: Iterable[tuple[float, float, float]]) -> GradientSums:
        """Sum up gradients, each given as ``|g_i|^2``, ``b_i`` and ``w_i``."""
        used = [row for row in rows if row[2]]
        return cls(
            len(used),
            math.fsum(w for _, _, w in used),
            math.fsum(w * square for square, _, w in used),
            math.fsum(w / b for _, b, w in used),
            math.fsum(w * w / b for _, b, w in used),
        )

    def plus(self, other: GradientSums) -> GradientSums:
        """Of the gradients of both."""
        return GradientSums(*(mine + others for mine, others in zip(self, other, strict=True)))


class Moments(NamedTuple):
    """Estimates of one step, or averages of them.

    Attributes:
        noise: Of ``tr(Sigma)``, the variance of one sample's gradient, at least 0 up to rounding.
        signal: Of ``|G|^2``; where there is much noise it may be negative.
    """

    noise: float
    signal: float


def estimate(sums: GradientSums, square: float) -> Moments:
    """Unbiased estimates from one step, of small gradients of any sizes and weights.

    The two equations ``E sum(w_i |g_i|^2) = W |G|^2 + tr(Sigma) sum(w_i / b_i)`` and
    ``E |g|^2 = W^2 |G|^2 + tr(Sigma) sum(w_i^2 / b_i)``, where ``W = sum(w_i)``, are solved for both unknowns.

    Args:
        sums: Of the small gradients.
        square: ``|g|^2`` of ``g = sum(w_i g_i)``.

    Raises:
        ValueError: If there are fewer than two small gradients: noise cannot be told from signal.

    Source: arXiv:1812.06162, appendix A.1, whose batches of two sizes are the case ``w_i = 1/n``, ``b_i = b``.
    """
    freedom = sums.weight * sums.inverses - sums.variance  # sum of w_i (W - w_i) / b_i
    if sums.number < 2 or freedom <= 0:
        raise ValueError(f"{sums.number:.0f} gradients with a weight of {sums.weight} in all: it takes at least two.")
    noise = (sums.weight * sums.squares - square) / freedom
    return Moments(noise, (square - noise * sums.variance) / sums.weight**2)


def noise_scale(moments: Moments) -> float:
    """``B_simple = tr(Sigma) / |G|^2`` in samples; infinite where no signal is left, NaN where nothing is known.

    Source: arXiv:1812.06162, section 2.2.
    """
    if moments.signal > 0:
        return max(moments.noise, 0.0) / moments.signal
    return math.inf if moments.noise > 0 else math.nan


class BatchCosts(NamedTuple):
    """What a batch size costs, against the least that any batch size does.

    Attributes:
        steps: Steps to a given loss, over the fewest: those of very large batches.
        samples: Samples to it, over the fewest: those of very small batches.
    """

    steps: float
    samples: float


def batch_costs(batch_size: float, scale: float) -> BatchCosts:
    """Steps ``1 + B_noise / B`` and samples ``1 + B / B_noise``: both are 2 at the critical batch size.

    Args:
        batch_size: ``B``, of all replicas and micro-batches, in samples; above 0.
        scale: The noise scale in samples, above 0.

    Raises:
        ValueError: If one of them is not above 0.

    Source: arXiv:1812.06162, section 2.3: ``(steps - 1) (samples - 1) = 1``.
    """
    if not (batch_size > 0 and scale > 0):
        raise ValueError(f"batch_size={batch_size} and scale={scale} must be above 0.")
    return BatchCosts(1 + scale / batch_size, 1 + batch_size / scale)
