"""Which precision plugins work, and those of this package in the place of Lightning's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch.optim import Adafactor, Optimizer

from lightning_hybrid.parallel.engine import Engine

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-true", "16-mixed")
KNOWN = (Precision, DoublePrecision, MixedPrecision)


@runtime_checkable
class Masters(Protocol):
    """What a strategy asks of a precision plugin with float32 masters.

    Attributes:
        compute_dtype: Type of the copies that modules show in a step.
        loss_scale: What losses are multiplied by before they are differentiated.
    """

    compute_dtype: torch.dtype
    loss_scale: float

    def bind(self, engine: Engine) -> None:
        """Work with an engine."""


replacements: dict[str, Callable[[Any], Precision]] = {}
"""Of each of Lightning's precisions that is replaced, what makes ours from the plugin; filled with the package."""


def ours(precision: Precision) -> Precision:
    """The plugin itself, or this package's where Lightning's would keep no float32 masters, or its own loss scale."""
    is_replaced = type(precision) in (HalfPrecision, MixedPrecision) and precision.precision in replacements
    return replacements[str(precision.precision)](precision) if is_replaced else precision


def check_precision(precision: Precision) -> None:
    """Refuse what would keep no float32 masters, or a loss scale of each process's own.

    Raises:
        ValueError: Naming those that work.
    """
    lightnings = type(precision).__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
    is_known = isinstance(precision, Masters) or (
        precision.precision in PRECISIONS[:3] and (type(precision) in KNOWN or not lightnings)
    )
    if not is_known:
        raise ValueError(
            f"{type(precision).__name__} with precision={precision.precision!r} does not work with hybrid_ptdp: it "
            f"knows nothing of the other stages, slices and shards. Choose precision= one of {', '.join(PRECISIONS)}."
        )


def check_masters(precision: Precision, module: LightningModule, optimizers: Sequence[Optimizer]) -> None:
    """Refuse what would train the 16-bit copies, or cannot work on the masters.

    Raises:
        ValueError: Naming the feature and the way out.
    """
    if not isinstance(precision, Masters):
        return
    if not module.automatic_optimization:
        raise ValueError(
            f"automatic_optimization=False with precision={precision.precision!r}: the schedule makes the gradients of "
            "float32 masters, and a step that runs its own backward passes would meet 16-bit copies. Let Lightning "
            "optimize, or choose precision='bf16-mixed'."
        )
    if any(isinstance(optimizer, Adafactor) for optimizer in optimizers):
        raise ValueError(
            f"torch.optim.Adafactor cannot work on the sharded masters of precision={precision.precision!r}. Choose "
            "another optimizer, or precision='bf16-mixed' with zero_stage=0."
        )
