"""What a growing run says and logs."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_hybrid.callbacks.fit_factors import FitFactors
from lightning_hybrid.callbacks.global_batch import dataset_size
from lightning_hybrid.callbacks.reports import is_logging_step
from lightning_hybrid.functional.growth import Level, Shares, noise_scale


def tell_level(
    trainer: Trainer, batch_idx: int, before: float, now: Level, shares: Shares, units: float, unit: str
) -> None:
    """Say on rank 0 that a level begins, with how its batch comes about.

    Args:
        trainer: With the level's accumulation.
        batch_idx: First batch.
        before: Batch of the level before, in units.
        now: The level.
        shares: How its batch is shared out.
        units: What a sample counts.
        unit: What they are called.
    """
    accumulate, joined = trainer.accumulate_grad_batches, f" x {shares.merged} joined" if shares.merged > 1 else ""
    each = now.batch * units / accumulate / shares.replicas
    short = trainer.num_training_batches % accumulate
    rest = f"; the last step of an epoch has {short:g} of {accumulate} batches" if 0 < short < accumulate else ""
    rank_zero_info(
        f"BatchSizeGrowth: from epoch {trainer.current_epoch}, batch {batch_idx} on, a global batch of "
        f"{now.batch * units:.12g} {unit} (before: {before:.12g}) = {each:.12g}{joined} x {shares.accumulate} "
        f"accumulated x {shares.replicas} replicas; learning rates x {now.rate:g}{rest}"
    )


def log_growth(trainer: Trainer, pl_module: LightningModule, factors: FitFactors, samples: int, units: float) -> None:
    """Log rates, batch and noise scale of the last step, every `log_every_n_steps`.

    Args:
        trainer: The Trainer.
        pl_module: The module.
        factors: With the rates.
        samples: Of the step, over all replicas.
        units: What a sample counts.
    """
    factors.log(trainer, pl_module)
    if not is_logging_step(trainer):
        return
    pl_module.log("global_batch_size", float(samples * units), batch_size=1)
    size, (optimizer, *_), (first, *_) = dataset_size(trainer), factors.optimizers, factors
    rates = first.effective_rates if size is not None else []
    for number, rate in enumerate(rates):
        group = optimizer.param_groups[number]
        momentum = float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))
        name = f"noise_scale/{group.get('name', number)}" if len(rates) > 1 else "noise_scale"
        pl_module.log(name, noise_scale(rate, samples, size or 0, momentum), batch_size=1)


def mean_of(trainer: Trainer, name: str) -> float:
    """A logged value, as the mean over all ranks, so that they grow together.

    Raises:
        ValueError: If there is none of that name.
    """
    value = trainer.callback_metrics.get(name)
    if value is None:
        raise ValueError(
            f"BatchSizeGrowth(on_plateau={name!r}): no such value has been logged. There are "
            f"{sorted(trainer.callback_metrics)}."
        )
    value = value.detach().clone().to(trainer.strategy.root_device)
    return float(trainer.strategy.reduce(value, reduce_op="mean"))
