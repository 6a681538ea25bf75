"""Measures of a training: torchmetrics objects, usable with `self.log`."""

from lightning_hybrid.metrics.gradient_noise_scale import GradientNoiseScale
from lightning_hybrid.metrics.hessian import HessianTopEigenvalue
from lightning_hybrid.metrics.pipeline_bubble import PipelineBubble
from lightning_hybrid.metrics.sharpness import Sharpness
from lightning_hybrid.metrics.throughput import ModelFlopsUtilization, Throughput

__all__ = [
    "GradientNoiseScale",
    "HessianTopEigenvalue",
    "ModelFlopsUtilization",
    "PipelineBubble",
    "Sharpness",
    "Throughput",
]
