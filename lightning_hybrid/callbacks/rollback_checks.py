"""What a `DivergenceRollback` is not given, and runs that cannot go back."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader

from lightning_hybrid.callbacks.arguments import check_whole
from lightning_hybrid.callbacks.feeds import refuse_own_fetching

NAME = "DivergenceRollback"


def check_arguments(
    keep: Any, snapshot_every: Any, skip_batches: Any, max_retries: Any, detector: Any, on_retry: Any, lr_factor: Any
) -> None:
    """Refuse arguments that are out of range.

    Raises:
        ValueError: With the argument's name and value.
    """
    for name, value in (("keep", keep), ("snapshot_every", snapshot_every), ("max_retries", max_retries)):
        check_whole(name, value, 1)
    if skip_batches is not None:
        check_whole("skip_batches", skip_batches, 1)
    if detector not in ("nan", "spike") and not callable(detector):
        raise ValueError(f"detector={detector!r} must be 'nan', 'spike' or a function of loss and gradient norm.")
    if on_retry not in (None, "lower_lr", "restart_optimizer") and not callable(on_retry):
        raise ValueError(f"on_retry={on_retry!r} must be None, 'lower_lr', 'restart_optimizer' or a function.")
    if isinstance(lr_factor, bool) or not isinstance(lr_factor, int | float) or not 0 < lr_factor < 1:
        raise ValueError(f"lr_factor={lr_factor!r} must be above 0 and below 1.")


def refuse_runs(trainer: Trainer, pl_module: LightningModule, *, saves: bool) -> None:
    """Refuse a run that cannot go back; call it in `on_fit_start`.

    Args:
        trainer: The Trainer.
        pl_module: Its module.
        saves: Snapshots are checkpoints.

    Raises:
        ValueError: With what stands in the way, and the way out.
    """
    refuse_own_fetching(pl_module, NAME)
    if not pl_module.automatic_optimization:
        raise ValueError(
            f"{type(pl_module).__name__} optimizes manually: {NAME} cannot leave a step before its update, with code "
            f"of the module around it. Set automatic_optimization, or remove {NAME}."
        )
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    strategy = trainer.strategy
    whole = isinstance(strategy, SingleDeviceStrategy | DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy)
    is_ours = hasattr(strategy, "held_parameters")
    if not (is_ours or whole or isinstance(strategy, ModelParallelStrategy)):
        raise ValueError(
            f"{NAME} does not know where {type(strategy).__name__} has its parameters and optimizer states. Use "
            "strategy='hybrid_ptdp', with zero_stage=1, 2 or 3 for shards, or 'ddp'."
        )
    averages = any(isinstance(callback, StochasticWeightAveraging) for callback in callbacks)
    if averages and StochasticWeightAveraging.pl_module_contains_batch_norm(pl_module):
        raise ValueError(
            "StochasticWeightAveraging takes the statistics of batch normalisation from one more epoch without steps, "
            f"with the batches that {NAME} has left out. Use WeightAveraging in its place."
        )
    if not saves:
        return
    if not (is_ours or whole):
        raise ValueError(
            f"{type(strategy).__name__} loads checkpoints only when a run begins. Leave checkpoint_dir out, which "
            "keeps snapshots in host memory."
        )
    if any(isinstance(callback, WeightAveraging) for callback in callbacks):
        raise ValueError(
            "WeightAveraging puts its average in the place of the weights of a checkpoint. Leave checkpoint_dir out, "
            "which keeps snapshots in host memory."
        )


def refuse_loaders_ahead(trainer: Trainer) -> None:
    """Refuse to go on where a loader's saved place is beyond the batches that count; call it in `on_train_start`.

    Raises:
        RuntimeError: Naming the loader.
    """
    for loader in CombinedLoader(trainer.train_dataloader, "sequential").flattened:
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            raise RuntimeError(
                f"The checkpoint was saved while {NAME} trained again on batches from memory: the place of the "
                f"{type(loader).__name__} in it is beyond them, and they would be lost. Resume from one saved before."
            )
