"""Optimizers for large batches, whose norms, means and factors are those of whole tensors on any shards."""

from lightning_hybrid.optim.lamb import Lamb
from lightning_hybrid.optim.lars import Lars

__all__ = ["Lamb", "Lars"]
