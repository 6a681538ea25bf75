"""Feeds a GradientNoiseScale from the backward passes that a training makes anyway."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from torch import Tensor
from typing_extensions import override

from lightning_hybrid.callbacks.backward_passes import BackwardPasses
from lightning_hybrid.callbacks.micro_batches import MicroBatches, WatchesGradients
from lightning_hybrid.compat import is_accumulating
from lightning_hybrid.functional.noise_scale import GradientSums, noise_scale
from lightning_hybrid.metrics.gradient_noise_scale import GradientNoiseScale


class GradientNoiseScaleMonitor(Callback):
    """Measures the gradient noise scale while training, without any further pass, and logs it after each step.

    The gradients of single backward passes are held against the step's: with Lightning's strategies those of each
    replica and each batch of an accumulation window, with `hybrid_ptdp` those of each micro-batch of each replica. The
    step's gradient is taken behind the last backward pass, before anything adds noise to it, clips it or otherwise
    changes it. Steps with gradients that are not finite, which loss scalers skip, and steps with one gradient only, as
    at an epoch's end, do not count.

    Args:
        metric: What is fed, for instance one that the LightningModule logs itself; None makes one.
        name: What the scale is logged as; None logs nothing.

    Attributes:
        metric: It; equal on all ranks, in checkpoints, and not to be updated by anybody else.

    Raises:
        TypeError: If `metric` is something else.
        ValueError: Before training, where gradients of single passes cannot be had: with a strategy that shows nothing
            but their sum, with tied parameters on several stages, with an expert axis or sequence parallelism, with
            manual optimization; and where a step has one gradient only.

    Source: McCandlish et al. 2018, arXiv:1812.06162, appendix A.1.
    """

    def __init__(self, metric: GradientNoiseScale | None = None, name: str | None = "gradient_noise_scale") -> None:
        if metric is not None and not isinstance(metric, GradientNoiseScale):
            raise TypeError(f"metric={metric!r} is no GradientNoiseScale.")
        self.metric, self.name = metric if metric is not None else GradientNoiseScale(), name
        self._source: BackwardPasses | MicroBatches | None = None
        self._window = GradientSums()
        self._has_measured = self._is_new = False

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove()
        if not pl_module.automatic_optimization:
            raise ValueError(
                "automatic_optimization=False: the step's own backward passes may be of several losses, and their "
                "gradients not parts of one. Let Lightning optimize, or leave out GradientNoiseScaleMonitor."
            )
        self._is_new = False
        self._source = _source_of(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._has_measured = trainer.global_step > 0 and self.metric.steps > 0  # of the same run, which goes on

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert self._source is not None
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._window = GradientSums()  # of a window that was never applied
            self._source.begin_window()
        if not self._has_measured:
            self._source.check_parts()
        self._source.begin_batch(batch)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        assert self._source is not None
        self._source.begin_pass()

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._source is not None
        self._window = self._window.plus(self._source.end_pass())
        if not is_accumulating(trainer):
            sums, square = self._source.finish(self._window)
            self._window = GradientSums()
            self._take(sums, square)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._is_new and self.name is not None:
            scale = noise_scale(self.metric.moments)
            pl_module.log(self.name, scale, on_step=True, on_epoch=False, batch_size=1)
        self._is_new = False

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._remove()

    @override
    def state_dict(self) -> dict[str, Any]:
        # empty with Lightning's strategies, which do not save the gradients of an unfinished window either
        return {"metric": self.metric.saved(), "window": list(self._window)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.metric.restore(state_dict["metric"])
        self._window, self._is_new = GradientSums(*state_dict["window"]), False

    def _take(self, sums: GradientSums, square: float) -> None:
        if sums.number >= 2:
            self._has_measured = True
            if math.isfinite(square + sum(sums)):
                self.metric.update(sums, square)
                self._is_new = True
        elif not self._has_measured:
            raise ValueError(
                "A step has one gradient only, and its noise shows only beside a second one. Give num_microbatches=2, "
                "accumulate_grad_batches=2 or two replicas, and batches of at least two samples."
            )

    def _remove(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.remove()


def _source_of(trainer: Trainer) -> BackwardPasses | MicroBatches:
    strategy = trainer.strategy
    (optimizer,) = trainer.optimizers  # there are several with manual optimization alone
    if isinstance(strategy, WatchesGradients):
        return MicroBatches(trainer, optimizer)
    whole = isinstance(strategy, SingleDeviceStrategy | DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy)
    if not whole:
        raise ValueError(
            f"{type(strategy).__name__} shows gradients only when they are summed over the replicas. Choose "
            "strategy='hybrid_zero1', 'hybrid_zero2' or 'hybrid_zero3', or leave out GradientNoiseScaleMonitor."
        )
    return BackwardPasses(trainer, optimizer)
