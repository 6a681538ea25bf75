"""What a K-FAC preconditioner is not given, and runs that it cannot work in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.optim import LBFGS

from lightning_hybrid.callbacks.arguments import check_whole
from lightning_hybrid.callbacks.kfac_layers import NAME
from lightning_hybrid.callbacks.step_alone import refuse_parts
from lightning_hybrid.functional.stepwise import check_stepwise, is_positive


def check_arguments(
    damping: Any,
    factor_decay: Any,
    factor_every: Any,
    inverse_every: Any,
    kl_clip: Any,
    method: Any,
    fisher: Any,
    modules: Any,
    seed: Any,
) -> None:
    """Refuse arguments that are out of range.

    Raises:
        ValueError: With the argument's name and value.
    """
    check_stepwise("damping", damping, whole=False)
    check_stepwise("factor_every", factor_every, whole=True)
    check_stepwise("inverse_every", inverse_every, whole=True)
    if isinstance(factor_decay, bool) or not isinstance(factor_decay, int | float) or not 0 <= factor_decay < 1:
        raise ValueError(f"factor_decay={factor_decay!r} must be a number of at least 0 and below 1.")
    if kl_clip is not None and not is_positive(kl_clip, whole=False):
        raise ValueError(f"kl_clip={kl_clip!r} must be a finite number above 0, or None.")
    if method not in ("eigen", "inverse"):
        raise ValueError(f"method={method!r} must be 'eigen' or 'inverse'.")
    if fisher not in ("empirical", "mc"):
        raise ValueError(f"fisher={fisher!r} must be 'empirical' or 'mc'.")
    check_whole("seed", seed, 0)
    rules = [modules] if isinstance(modules, str | type) else modules
    if rules is not None and (not isinstance(rules, Sequence) or not rules or not all(map(_is_rule, rules))):
        raise ValueError(f"modules={modules!r} must be patterns of names or types of modules, or None for all layers.")


def refuse_runs(trainer: Trainer, pl_module: LightningModule, *, takes_all: bool, draws: bool) -> None:
    """Refuse a run whose gradients are not a layer's whole; call it in `on_fit_start`.

    Args:
        trainer: The Trainer.
        pl_module: Its module.
        takes_all: Layers are all that can be.
        draws: Labels are drawn, in passes beside training.

    Raises:
        ValueError: With what stands in the way, and the way out.
    """
    kind, strategy = type(pl_module).__name__, trainer.strategy
    if not pl_module.automatic_optimization:
        raise ValueError(
            f"{kind} optimizes manually: its backward passes may be of several losses, and {NAME} would not know whose "
            f"slopes it sees. Set automatic_optimization, or remove {NAME}."
        )
    if is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            f"{kind}.training_step fetches its own batches by dataloader_iter, and {NAME} would not know how many "
            f"samples they have. Take (batch, batch_idx) instead, or remove {NAME}."
        )
    whole = isinstance(strategy, SingleDeviceStrategy | DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy)
    if not whole and not hasattr(strategy, "set_apart"):
        raise ValueError(
            f"{NAME} cannot put gradients together under {type(strategy).__name__}. Use strategy='hybrid_ptdp', with "
            "zero_stage=1, 2 or 3 to shard, or 'ddp'."
        )
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    finetuning = next((type(c).__name__ for c in callbacks if isinstance(c, BaseFinetuning)), None)
    if takes_all and finetuning is not None:
        raise ValueError(
            f"{finetuning} trains layers from later epochs on, which {NAME} would not take: it takes those that are "
            "trained from the beginning. Name these in modules."
        )
    if any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
        raise ValueError(f"LBFGS runs backward passes many times a step, and has curvature of its own. Remove {NAME}.")
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None and any(g.get("fused") for optimizer in trainer.optimizers for g in optimizer.param_groups):
        raise ValueError(
            f"precision={trainer.precision!r} leaves gradients scaled for an optimizer with fused=True, and natural "
            "gradients would be divided by the scale. Leave fused out."
        )
    if draws:
        refuse_parts(trainer, pl_module, f"{NAME}(fisher='mc')")


def _is_rule(rule: object) -> bool:
    return isinstance(rule, str) or (isinstance(rule, type) and issubclass(rule, nn.Module))
