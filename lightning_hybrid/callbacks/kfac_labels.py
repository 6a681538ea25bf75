"""The pass beside training in which a model draws its own labels."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_hybrid.callbacks.global_batch import count_samples, num_replicas
from lightning_hybrid.callbacks.kfac_runs import OwnPasses
from lightning_hybrid.callbacks.step_alone import StepAlone
from lightning_hybrid.parallel.curvature.likelihoods import DrawnLabelsMode
from lightning_hybrid.parallel.curvature.sums import WindowSums
from lightning_hybrid.parallel.streams import derived_seed


class DrawnLabels:
    """Feeds sums of slopes from a pass with drawn labels.

    Args:
        seed: Of the draws. They depend on it, the step, and the batch's number among those of all replicas in it.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def run(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        step: int,
        sums: WindowSums,
        own: OwnPasses,
    ) -> None:
        """Run a batch beside training; sums take in slopes of the loss of each sample.

        Args:
            trainer: In `fit`.
            pl_module: Its module.
            batch: This replica's batch.
            batch_idx: Its number.
            step: Steps that have been applied.
            sums: A window's.
            own: Tells them which backward pass is this one's.

        Raises:
            ValueError: If the step calls no loss whose distribution is known.
        """
        number = batch_idx % trainer.accumulate_grad_batches * num_replicas(trainer) + trainer.global_rank
        generator = torch.Generator().manual_seed(derived_seed(self._seed, "labels", step, number))
        alone, mode = StepAlone(trainer, pl_module), DrawnLabelsMode(generator)
        sums.takes, sums.weight = True, float(count_samples(batch))
        try:
            with alone.unseen(), mode:
                alone.run(batch, batch_idx, own.begin)
        finally:
            own.end()
            sums.takes = False
        if not mode.number:
            raise ValueError(
                f"{type(pl_module).__name__}.training_step calls none of torch's losses whose distribution is known "
                "(cross_entropy, nll_loss, binary_cross_entropy, mse_loss), so that no labels can be drawn for "
                "KFACPreconditioner(fisher='mc'). Use one of them, or fisher='empirical'."
            )
