"""The top eigenvalue of Hessians that NumPy knows."""

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_hybrid.metrics import HessianTopEigenvalue
from tests.metrics.surfaces import Quadratic, drawn
from tests.small import Block


def value_of(module, loss, **options):
    metric = HessianTopEigenvalue(**options)
    metric.update(module, loss)
    return float(metric.compute()), metric.last


@pytest.mark.parametrize("shift", [0.0, 3.0, 30.0])  # positive eigenvalues alone, both signs, negative ones alone
def test_value_is_numpys_on_a_quadratic(shift):
    root = drawn(7, 7)
    module = Quadratic(drawn(7), root @ root.T - shift * torch.eye(7, dtype=torch.float64))
    found, last = value_of(module, module.loss, iterations=500)
    assert found == pytest.approx(numpy.linalg.eigvalsh(module.hessian.numpy())[-1], abs=1e-6)
    assert last.converged


class Attention(nn.Module):
    """A network with fused attention, whose kernels have no second derivatives."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(4, 2, bias=False, batch_first=True).double()
        self.x = drawn(3, 5, 4)

    def loss(self):
        return self.attention(self.x, self.x, self.x, need_weights=False)[0].sin().square().mean()


def hessian_of(module, loss):
    """The whole matrix, row by row."""
    parameters = list(module.parameters())
    slopes = torch.autograd.grad(loss(), parameters, create_graph=True)
    flat = torch.cat([slope.flatten() for slope in slopes])
    rows = [torch.autograd.grad(entry, parameters, retain_graph=True) for entry in flat]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])


def test_value_is_numpys_on_a_network_with_attention():
    module = Attention()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = numpy.linalg.eigvalsh(hessian_of(module, module.loss).numpy())
    found, last = value_of(module, module.loss, iterations=1000, tolerance=1e-5)
    assert found == pytest.approx(expected[-1], abs=1e-6)
    assert last.converged


def test_compiled_modules_are_measured_as_they_are_without():
    torch.manual_seed(0)
    module, x = nn.Sequential(Block(3), Block(3)).double(), drawn(5, 3)

    def loss():
        return (module(x) - 1).square().mean()

    expected = numpy.linalg.eigvalsh(hessian_of(module, loss).numpy())[-1]
    module.compile(backend="aot_eager")
    assert value_of(module, loss, iterations=1000, tolerance=1e-5)[0] == pytest.approx(expected, abs=1e-6)


def test_iterations_that_do_not_suffice_warn_with_the_bound():
    module = Quadratic(drawn(4), torch.tensor([1.0, 0.99, 0.5, 0.1], dtype=torch.float64).diag())
    with pytest.warns(UserWarning, match=r"is about 0\.\d+, and an eigenvalue is within .* Raise iterations=3"):
        found, last = value_of(module, module.loss, iterations=3)
    assert not last.converged
    assert abs(found - 1) < last.residual + 0.01


def test_loss_without_curvature_has_the_value_0_and_seeds_repeat():
    net = nn.Linear(3, 1)
    assert value_of(net, lambda: net.weight.sum())[0] == 0
    module = Quadratic(drawn(4), drawn(4).square().diag())
    first, again, other = (value_of(module, module.loss, iterations=500, seed=seed)[1] for seed in (0, 0, 1))
    assert first == again != other
    assert F.l1_loss(torch.tensor(first.value), torch.tensor(other.value)) < 1e-6


@pytest.mark.parametrize(("keyword", "value"), [("iterations", 0), ("tolerance", 0.0), ("tolerance", float("nan"))])
def test_keywords_are_checked(keyword, value):
    with pytest.raises(ValueError, match=f"{keyword}={value}"):
        HessianTopEigenvalue(**{keyword: value})
