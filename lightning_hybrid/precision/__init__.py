"""16-bit compute over float32 master weights."""

from lightning_hybrid.precision.master_weights import MasterWeights

__all__ = ["MasterWeights"]
