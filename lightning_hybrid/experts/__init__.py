"""Mixtures of experts: routers and a layer that works in any model."""

from lightning_hybrid.experts.layer import MoELayer

__all__ = ["MoELayer"]
