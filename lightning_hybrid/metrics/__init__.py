"""Metrics of torchmetrics that guide large-batch training."""

from lightning_hybrid.metrics.hessian import HessianTopEigenvalue
from lightning_hybrid.metrics.pipeline_bubble import PipelineBubble
from lightning_hybrid.metrics.sharpness import Sharpness

__all__ = [
    "HessianTopEigenvalue",
    "PipelineBubble",
    "Sharpness",
]
