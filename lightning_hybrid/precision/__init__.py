"""16-bit compute over float32 master weights."""

from lightning_hybrid.precision.fp16 import FP16MasterWeights
from lightning_hybrid.precision.master_weights import MasterWeights

__all__ = ["FP16MasterWeights", "MasterWeights"]
