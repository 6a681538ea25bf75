"""Samples or tokens of the whole job by time, and the share of the devices' arithmetic that the model has asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NoReturn

import torch
import torch.distributed as dist
from lightning.fabric.utilities.throughput import get_available_flops
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from lightning_hybrid.functional.utilization import beyond_peak, model_flops_utilization


class Throughput(Metric):
    """What all replicas together have done in a second, since the last reset.

    Replicas' counts are added up exactly, also where their batches differ; the slowest one's time counts. Lightning's
    own `Throughput` multiplies one rank's count by the number of processes, which counts a sample once for each rank of
    a pipeline or tensor axis. Under `hybrid_ptdp` the metric must be an attribute of the LightningModule: the strategy
    then adds over the data axis alone.

    The clock is read in `start` and `update` and nowhere else, and no device is waited for: what a step has queued and
    not computed counts with the next one.

    Args:
        clock: Gives seconds.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = True
    count: Tensor
    seconds: Tensor

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._clock = clock
        self._mark: float | None = None
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("seconds", torch.zeros((), dtype=torch.float64), dist_reduce_fx="max")

    def start(self) -> None:
        """Let the time of the next `update` begin now, as after validation, whose time shall not count."""
        self._mark = self._clock()

    def update(self, count: int) -> None:
        """Add a step, which began with the last `start` or `update`; without either, it only begins the next one.

        Args:
            count: Samples, tokens or batches of this rank's replica.
        """
        now = self._clock()
        if self._mark is not None:
            self.count += count
            self.seconds += now - self._mark
        self._mark = now

    def reset(self) -> None:
        """Forget all steps; the next one begins with `start`."""
        super().reset()
        self._mark = None

    def compute(self) -> Tensor:
        """Count by second, a float64 scalar; NaN before the first step has been timed."""
        return self.count / self.seconds if self.seconds else torch.full_like(self.seconds, torch.nan)

    def forward(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse a call, which would have to give the value of a single step on this rank alone.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"{type(self).__name__} has no value of a single step. Call update(...), and log it with on_step=False and "
            "on_epoch=True; callbacks.UtilizationMonitor logs while an epoch goes on."
        )


class ModelFlopsUtilization(Throughput):
    """Model FLOPs over those that all devices could have done in the time since the last reset.

    Source: Chowdhery et al. 2022, PaLM, arXiv:2204.02311, appendix B. Recomputation and padding to more samples do not
    count as work of the model; `functional.utilization.training_flops` counts, or 6 for each parameter and token.

    Args:
        flops: Of forward and backward for one of what `update` counts: a sample, or a token.
        peak_flops: Of one device, in FLOP/s, for the type that matrix products run in; None looks an accelerator up in
            Lightning's table, which has some numbers with sparsity.
        dtype: That type, to look it up.
        num_devices: On all axes; None for the number of processes.
        clock: Gives seconds.

    Raises:
        ValueError: If a number is not positive, or there is no accelerator to look up; in `start` or the first
            `update`, if the table has none for this one.
    """

    def __init__(
        self,
        flops: float,
        peak_flops: float | None = None,
        dtype: torch.dtype = torch.bfloat16,
        num_devices: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(clock)
        for name, value in (("flops", flops), ("peak_flops", peak_flops), ("num_devices", num_devices)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value!r} must be above 0.")
        if peak_flops is None and not torch.accelerator.is_available():
            raise ValueError("peak_flops=None: nobody knows the peak of a CPU. Give it, in FLOP/s of one process.")
        self.flops, self.peak_flops, self.num_devices, self._dtype = flops, peak_flops, num_devices, dtype

    def start(self) -> None:
        """As of :class:`Throughput`."""
        self._know_peak()
        super().start()

    def update(self, count: int) -> None:
        """As of :class:`Throughput`."""
        self._know_peak()
        super().update(count)

    def compute(self) -> Tensor:
        """A share of 1, a float64 scalar; NaN before the first step has been timed."""
        assert self.peak_flops is not None or not self.seconds
        value = model_flops_utilization(
            self.flops,
            count=self.count.item(),
            seconds=self.seconds.item(),
            num_devices=self.num_devices or (dist.get_world_size() if dist.is_initialized() else 1),
            peak_flops=self.peak_flops or 1.0,
        )
        if value > 1:
            rank_zero_warn(beyond_peak(self.flops, self.peak_flops or 1.0))
        return torch.full_like(self.seconds, value)

    def _know_peak(self) -> None:
        if self.peak_flops is None:
            self.peak_flops = get_available_flops(self.device, self._dtype)
        if self.peak_flops is None:
            raise ValueError(
                f"peak_flops=None, and Lightning's table has no peak of {self.device} for {self._dtype}. Give it, in "
                "FLOP/s of one device."
            )
