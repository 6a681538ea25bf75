"""Power iteration against NumPy's eigenvalues."""

import numpy
import pytest
import torch

from lightning_hybrid.functional.power_iteration import largest_eigenvalue

SPECTRA = {
    "positive": [5, 3, 2, 1, 0.1, 0],
    "degenerate": [4, 4, 4, 1, 1, 0],
    "more negative than positive": [2, 1, 0.5, 0, -1, -6],
    "both signs alike": [3, 1, 0, 0, -1, -3],
    "negative": [-1, -2, -3, -4, -5, -6],
    "negative semidefinite": [0, -1, -2, -3, -4, -5],
    "zero": [0, 0, 0, 0, 0, 0],
}


def matrix(eigenvalues, seed=0):
    random = torch.randn(6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    basis = torch.linalg.qr(random).Q
    return basis @ torch.tensor(eigenvalues, dtype=torch.float64).diag() @ basis.T


def start():
    return [part.clone() for part in torch.linspace(-1, 2, 6, dtype=torch.float64).split([2, 4])]


def power(hessian, iterations=300, tolerance=1e-4):
    return largest_eigenvalue(
        lambda v: [part.clone() for part in (hessian @ torch.cat(v)).split([2, 4])],
        start,
        iterations=iterations,
        tolerance=tolerance,
    )


@pytest.mark.parametrize("kind", SPECTRA)
def test_largest_eigenvalue_is_numpys(kind):
    hessian = matrix(SPECTRA[kind])
    found = power(hessian)
    assert found.converged
    assert found.value == pytest.approx(numpy.linalg.eigvalsh(hessian.numpy())[-1], abs=1e-6)


def test_residual_bounds_the_error_and_says_whether_iterations_sufficed():
    hessian = matrix([1, 0.99, 0.5, 0.2, 0.1, 0])
    found = power(hessian, iterations=10)
    assert (found.converged, found.iterations) == (False, 10)
    distances = numpy.abs(numpy.linalg.eigvalsh(hessian.numpy()) - found.value)
    assert 0 < distances.min() <= found.residual < 0.1
    assert power(hessian, iterations=10, tolerance=0.1).converged


def test_matrix_that_is_not_finite_has_no_eigenvalue():
    found = power(torch.full((6, 6), float("nan"), dtype=torch.float64))
    assert (found.value != found.value, found.converged, found.iterations) == (True, False, 1)
