"""Mixtures of experts: routers and a layer that works in any model."""

from lightning_hybrid.experts.layer import MoELayer
from lightning_hybrid.experts.loss_free import LossFree, share_counts
from lightning_hybrid.experts.router import Router
from lightning_hybrid.experts.routers import ExpertChoice, GShard, NoisyTopK, Switch, TopK, make_router

__all__ = [
    "ExpertChoice",
    "GShard",
    "LossFree",
    "MoELayer",
    "NoisyTopK",
    "Router",
    "Switch",
    "TopK",
    "make_router",
    "share_counts",
]
