"""Which precision plugins work, and those of this package in the place of Lightning's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch.optim import Adafactor, Optimizer, Rprop

from lightning_hybrid.optim.transition import flattened
from lightning_hybrid.parallel.engine import Engine
from lightning_hybrid.strategies.optimizer_checks import WORKS

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-true", "16-mixed")
KNOWN = (Precision, DoublePrecision, MixedPrecision)


@runtime_checkable
class Masters(Protocol):
    """What a strategy asks of a precision plugin with float32 masters.

    Attributes:
        compute_dtype: Type of the copies that modules show in a step.
        is_skipped: The last step was skipped, because gradients overflowed.
    """

    compute_dtype: torch.dtype
    is_skipped: bool

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by before they are differentiated."""

    def bind(self, engine: Engine) -> None:
        """Work with an engine."""

    def unit_of(self, batch: Any) -> float:
        """Power of two by which loss weights are divided; all ranks call it together."""

    def heed_weight(self, weight: float) -> None:
        """Learn the sum of the loss weights of a window, 0 where the step returns none."""


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
    for optimizer in flattened(optimizers):
        if isinstance(optimizer, Adafactor | Rprop):
            raise ValueError(
                f"torch.optim.{type(optimizer).__name__} cannot work on the sharded masters of "
                f"precision={precision.precision!r}. Choose {WORKS.get(type(optimizer), 'another optimizer')}, or "
                "precision='bf16-mixed' with zero_stage=0."
            )


class SkippedSteps:
    """While a step is skipped, schedulers that count steps wait: the learning rate is that of the steps applied."""

    def __init__(self, module: LightningModule, precision: Masters) -> None:
        self._module, self._precision = module, precision
        self._step = module.lr_scheduler_step
        vars(module)["lr_scheduler_step"] = self._step_unless_skipped

    def remove(self) -> None:
        """Give the module its own hook back."""
        vars(self._module).pop("lr_scheduler_step", None)

    def _step_unless_skipped(self, scheduler: Any, metric: Any) -> None:
        configs = self._module.trainer.strategy.lr_scheduler_configs
        each_step = any(config.scheduler is scheduler and config.interval == "step" for config in configs)
        if not (each_step and self._precision.is_skipped):
            self._step(scheduler, metric)
