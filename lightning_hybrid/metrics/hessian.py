"""The largest eigenvalue of the loss's Hessian."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_hybrid.functional.power_iteration import Eigenvalue, largest_eigenvalue
from lightning_hybrid.metrics.surface import SurfaceMetric


class HessianTopEigenvalue(SurfaceMetric):
    """The algebraically largest eigenvalue of the Hessian of the loss, by power iteration.

    Plain gradient descent at a rate above 2 / eigenvalue leaves a quadratic minimum, so it bounds the rate. At a
    point that is no minimum other eigenvalues may be negative and larger in magnitude: then a second, shifted iteration
    finds the largest, and not the one of largest magnitude. If all are negative the value is negative.

    Besides the parameters it takes memory for four copies of them, and for one backward pass of one batch that can be
    differentiated once more. An iteration costs about four forward passes over all batches. Attention is computed by
    matrix products, as the fused kernels have no second derivatives.

    Args:
        iterations: Most Hessian-vector products of each iteration. A warning tells if they do not suffice.
        tolerance: Iterate until an eigenvalue is that near for sure, relative to the largest magnitude. The error is
            then usually about the tolerance squared. Float32 does not get far below 1e-6.
        seed: Of the vector to begin with, the same on all ranks.
        kwargs: Of `torchmetrics.Metric`.

    Attributes:
        last: Value, residual, iterations and convergence of the last `compute`; None before.

    Raises:
        ValueError: If `iterations` is below 1 or `tolerance` not above 0. In `compute`, if the closure is not
            repeatable, or only some ranks have a batch.

    Source: Yao et al. 2020, PyHessian, arXiv:1912.07145, section 3. The library of that name was considered: it has
    models and data loaders of its own form, stops by change instead of residual, and knows one process.
    """

    def __init__(self, iterations: int = 100, tolerance: float = 1e-4, seed: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if iterations < 1:
            raise ValueError(f"iterations={iterations!r} must be at least 1.")
        if not tolerance > 0:
            raise ValueError(f"tolerance={tolerance!r} must be above 0, such as 1e-4.")
        self.iterations, self.tolerance, self.seed = iterations, tolerance, seed
        self.last: Eigenvalue | None = None

    @override
    def compute(self) -> Tensor:
        """Measure the batches of all ranks, at the parameters as they are now; NaN without a batch."""
        with self.opened() as surface:
            if surface is None:
                return torch.tensor(float("nan"), device=self.device)
            parameters = surface.parameters
            found = largest_eigenvalue(
                surface.product, lambda: self.start(parameters), iterations=self.iterations, tolerance=self.tolerance
            )
        self.last = found  # after the context, which puts attributes back
        if not found.converged:
            rank_zero_warn(
                f"The largest eigenvalue of the Hessian is about {found.value:.6g}, and an eigenvalue is within "
                f"{found.residual:.2g} of that, after {found.iterations} iterations. Raise "
                f"iterations={self.iterations} or tolerance={self.tolerance:g}."
            )
        return torch.tensor(found.value, dtype=parameters[0].dtype, device=parameters[0].device)

    def start(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The vector that iterations begin with: normal random numbers, the same on every device."""
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.randn(p.shape, generator=generator, dtype=p.dtype).to(p.device) for p in parameters]
