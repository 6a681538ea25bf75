"""Mixtures of experts: routers and a layer that works in any model."""
