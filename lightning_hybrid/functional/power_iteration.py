"""The largest eigenvalue of a symmetric matrix that is known by its products with vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite, sqrt
from typing import NamedTuple

from torch import Tensor

SAME_SIGN = 0.9  # a quotient that near to the norm of the product is not a mix of both signs

Vector = list[Tensor]


class Eigenvalue(NamedTuple):
    """An estimate of an eigenvalue.

    Attributes:
        value: Rayleigh quotient of the last vector.
        residual: ``|Hv - value v|`` of that unit vector v: an eigenvalue is at most that far away.
        iterations: Products that were taken.
        converged: The residual is within the tolerance.
    """

    value: float
    residual: float
    iterations: int
    converged: bool


def largest_eigenvalue(
    product: Callable[[Vector], Vector], start: Callable[[], Vector], *, iterations: int, tolerance: float
) -> Eigenvalue:
    """Find the algebraically largest eigenvalue by power iteration.

    Power iteration finds the eigenvalue of largest magnitude. If that is negative, or two of opposite sign are as
    large, a second iteration on H + rI, with the magnitude r, has no negative eigenvalues and finds the largest.

    Args:
        product: H times a vector, which is a list of tensors.
        start: A new vector to begin with, the same at each call; zero in no direction, such as random numbers.
        iterations: Most products of each of the two iterations.
        tolerance: Largest residual relative to the magnitude of H. The error of the value is about the residual squared
            over the distance to the next eigenvalue.

    Returns:
        The estimate. Which of several equal eigenvalues' vectors it comes from makes no difference.

    Source: Golub and Van Loan, Matrix Computations, 4th edition, sections 7.3.1 and 8.2.1.
    """
    found, radius = _iterate(product, start(), 0.0, iterations, tolerance)
    if not isfinite(radius) or (found.value >= 0 and (found.converged or found.value > SAME_SIGN * radius)):
        return found
    shifted, _ = _iterate(product, start(), radius, iterations, tolerance)
    return shifted._replace(iterations=found.iterations + shifted.iterations)


def _iterate(
    product: Callable[[Vector], Vector], vector: Vector, shift: float, iterations: int, tolerance: float
) -> tuple[Eigenvalue, float]:
    """The eigenvalue of H whose sum with the shift is largest in magnitude, and the norm of H's last product."""
    found, radius = Eigenvalue(float("nan"), float("inf"), 0, False), 0.0
    _divide(vector, _norm(vector))
    for number in range(1, iterations + 1):
        image = product(vector)
        value, radius = _dot(vector, image), _norm(image)
        for new, old in zip(image, vector, strict=True):
            new.sub_(old, alpha=value)
        residual = _norm(image)
        found = Eigenvalue(value, residual, number, residual <= tolerance * max(radius, shift))
        if found.converged or not isfinite(radius):
            break
        for new, old in zip(image, vector, strict=True):
            new.add_(old, alpha=value + shift)
        _divide(image, _norm(image))
        vector = image
    return found, radius


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return float(sum((x.double() * y.double()).sum().item() for x, y in zip(a, b, strict=True)))


def _norm(a: Sequence[Tensor]) -> float:
    return sqrt(_dot(a, a))


def _divide(vector: Sequence[Tensor], divisor: float) -> None:
    for part in vector:
        part.div_(divisor)
