"""Optimizers for large batches, whose norms, means and factors are those of whole tensors on any shards."""

from lightning_hybrid.functional.transitions import linear_schedule, transition_schedule
from lightning_hybrid.optim.adafactor import Adafactor
from lightning_hybrid.optim.lamb import Lamb
from lightning_hybrid.optim.lars import Lars
from lightning_hybrid.optim.rmsprop_to_sgd import RMSpropToSGD
from lightning_hybrid.optim.sm3 import SM3
from lightning_hybrid.optim.transition import OptimizerTransition

__all__ = [
    "SM3",
    "Adafactor",
    "Lamb",
    "Lars",
    "OptimizerTransition",
    "RMSpropToSGD",
    "linear_schedule",
    "transition_schedule",
]
