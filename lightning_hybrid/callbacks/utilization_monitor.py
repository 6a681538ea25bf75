"""How fast a job is while it trains: throughput of all replicas, use of the devices, bubble of the pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from lightning_hybrid.callbacks.global_batch import count_samples as samples_of
from lightning_hybrid.callbacks.global_batch import num_replicas
from lightning_hybrid.callbacks.reports import is_logging_step
from lightning_hybrid.functional.bubbles import bubble_ratio, bubble_share, pipeline_times
from lightning_hybrid.functional.utilization import beyond_peak, model_flops_utilization, training_flops
from lightning_hybrid.parallel.ledgers.traffic import over_ranks
from lightning_hybrid.parallel.pipeline.microbatch import batch_size
from lightning_hybrid.parallel.pipeline.snapshot import Snapshot

TYPES = {"64": torch.float64, "32": torch.float32, "16": torch.float16, "bf16": torch.bfloat16}
BUBBLES = {"share": bubble_share, "ratio": bubble_ratio}


@dataclass
class _Window:
    """What this rank has done since the clock stood at `start`."""

    start: float
    samples: int = 0
    tokens: int = 0
    batches: int = 0
    paused: float = 0.0


class UtilizationMonitor(Callback):
    """Logs throughput of the whole job and use of its devices, with any strategy; `ThroughputMonitor` that knows axes.

    Lightning's monitor multiplies rank 0's samples by the number of processes, which counts a sample once for each rank
    of a pipeline or tensor axis. Here the replicas' samples are added up, each once, also where batches differ. Every
    `log_every_n_steps` steps, for the steps since the last time, equal on all ranks:

    - `utilization/samples_per_second`, and with `count_tokens` `utilization/tokens_per_second`.
    - `utilization/batches_per_second`: batches that each replica has trained on.
    - `utilization/model_flops_utilization`, with FLOPs given or measured: PaLM's, arXiv:2204.02311, appendix B.
    - `utilization/pipeline_bubble`, under a strategy with a `timeline`: of the last batch, all replicas together.

    Time runs from the end of the first batch of a fit, which may compile or probe, and stands still in validation. Data
    loading, logging and checkpoints count. Where it is logged the device is waited for, and nowhere else.

    Args:
        flops_per_sample: Model FLOPs of forward and backward; "measured" counts those of matrix products in `forward`
            with the module's `example_input_array`, before the model is cut. None logs no use of devices.
        flops_per_token: In its place, with `count_tokens`.
        peak_flops: Of one device, in FLOP/s; None looks it up in Lightning's table for the device and the Trainer's
            precision. Some of its numbers are with sparsity.
        count_samples: Of a batch on this rank; None takes the first dimension of its first tensor.
        count_tokens: Likewise.
        bubble: "share" or "ratio", see `metrics.PipelineBubble`; None records no times.
        clock: Gives seconds.

    Attributes:
        last: What was logged last, by name without "utilization/".

    Raises:
        ValueError: If numbers are not positive or do not go together; before training, if the peak is not known or
            FLOPs cannot be measured.
    """

    def __init__(
        self,
        flops_per_sample: float | Literal["measured"] | None = None,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        count_samples: Callable[[Any], int] | None = None,
        count_tokens: Callable[[Any], int] | None = None,
        bubble: Literal["share", "ratio"] | None = "share",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        _check(flops_per_sample, flops_per_token, peak_flops, count_tokens)
        for name, count in (("count_samples", count_samples), ("count_tokens", count_tokens)):
            if count is not None and not callable(count):
                raise ValueError(f"{name}={count!r} must be a function of a batch, which gives a number.")
        if bubble not in (None, *BUBBLES):
            raise ValueError(f"bubble={bubble!r} must be 'share' (of total time), 'ratio' (to ideal time) or None.")
        self.flops_per_sample, self.flops_per_token, self.peak_flops = flops_per_sample, flops_per_token, peak_flops
        self.count_samples, self.count_tokens = count_samples or samples_of, count_tokens
        self.bubble, self.clock = bubble, clock
        self.last: dict[str, float] = {}
        self._flops: float | None = None
        self._peak = 0.0
        self._window: _Window | None = None
        self._step, self._pause, self._records, self._counts = 0, 0.0, False, (0, 0)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        given = self.flops_per_sample
        self._flops = measured(pl_module) if given == "measured" else given or self.flops_per_token
        if self._flops is not None:
            self._peak = self.peak_flops or known_peak(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.last, self._window, self._step = {}, None, trainer.global_step

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        strategy: Any = trainer.strategy
        self._records = (
            self.bubble is not None
            and hasattr(strategy, "timeline")
            and not strategy.record_timeline
            and interval > 0
            and (trainer.global_step + 1) % interval == 0
        )
        if self._records:
            strategy.record_timeline = True
        self._counts = self.count_samples(batch), self.count_tokens(batch) if self.count_tokens is not None else 0

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        is_new, self._step = trainer.global_step != self._step, trainer.global_step
        window = self._window
        if window is not None:
            samples, tokens = self._counts
            window.samples, window.tokens = window.samples + samples, window.tokens + tokens
            window.batches += 1
        if window is None or (is_new and is_logging_step(trainer)):
            _wait(trainer)
            now = self.clock()
            if window is not None:
                self._log(trainer, pl_module, window, now - window.start - window.paused)
            self._window = _Window(now)
        self._stop_recording(trainer)

    def leave_batch(self, trainer: Trainer) -> None:
        """See `callback_states.leave_batch`; its time counts, and its samples do not."""
        self._stop_recording(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop_recording(trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._window is not None:
            _wait(trainer)
            self._pause = self.clock()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._window is not None:
            self._window.paused += self.clock() - self._pause

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._window = None

    def _stop_recording(self, trainer: Trainer) -> None:
        if self._records:
            trainer.strategy.record_timeline = self._records = False  # type: ignore[attr-defined]

    def _log(self, trainer: Trainer, pl_module: LightningModule, window: _Window, seconds: float) -> None:
        """Log what all ranks agree on; they call it together."""
        strategy: Any = trainer.strategy
        is_recorded = self.bubble is not None and getattr(strategy, "record_timeline", False)
        times = pipeline_times(strategy.timeline()) if is_recorded else (0.0, 0.0)
        rows = over_ranks((window.samples, window.tokens, window.batches, seconds, *times))
        samples, tokens, batches, all_seconds, busy, total = zip(*rows, strict=True)
        slowest, copies = max(all_seconds), len(rows) // num_replicas(trainer)
        done = {"samples": sum(samples) // copies, "batches": max(batches)}
        if self.count_tokens is not None:
            done["tokens"] = sum(tokens) // copies
        self.last = {f"{name}_per_second": number / slowest for name, number in done.items()}
        if self._flops is not None:
            self.last["model_flops_utilization"] = model_flops_utilization(
                self._flops,
                count=done["samples" if self.flops_per_token is None else "tokens"],
                seconds=slowest,
                num_devices=len(rows),
                peak_flops=self._peak,
            )
            if self.last["model_flops_utilization"] > 1:
                rank_zero_warn(beyond_peak(self._flops, self._peak))
        if self.bubble is not None and is_recorded:
            self.last["pipeline_bubble"] = BUBBLES[self.bubble](sum(busy), sum(total))
        for name, value in self.last.items():
            pl_module.log(f"utilization/{name}", torch.tensor(value, dtype=torch.float64), batch_size=1)


def known_peak(trainer: Trainer) -> float:
    """FLOP/s of this rank's device by Lightning's table.

    Raises:
        ValueError: If it is not there.
    """
    device, precision = trainer.strategy.root_device, str(trainer.precision)
    peak = get_available_flops(device, TYPES.get(precision.partition("-")[0], precision))
    if not peak:
        raise ValueError(
            f"peak_flops=None, and Lightning's table has no peak of {device} for precision={precision!r}. Give "
            "UtilizationMonitor the FLOP/s of one device, or no FLOPs of the model."
        )
    return float(peak)


def measured(pl_module: LightningModule) -> float:
    """Model FLOPs a sample of the module's own example; call it while the model is whole.

    Raises:
        ValueError: If there is no example or no model yet, or it cannot run on the meta device.
    """
    name, way_out = type(pl_module).__name__, "Give UtilizationMonitor a number as flops_per_sample."
    example = pl_module.example_input_array
    if example is None:
        raise ValueError(
            f"flops_per_sample='measured', and {name} has no example_input_array. Set it to an input of forward, with "
            f"samples first. {way_out}"
        )
    if is_overridden("configure_model", pl_module):
        raise ValueError(f"flops_per_sample='measured', and {name} is made in configure_model, later. {way_out}")
    args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
    try:
        with Snapshot(pl_module, torch.device("cpu")):  # what forward counts and draws, it has not
            flops = training_flops(pl_module, args if isinstance(args, list | tuple) else (args,), kwargs)
    except Exception as error:  # the user's forward, on another device than it expects
        said = f"flops_per_sample='measured': {name}.forward fails on meta tensors: {error} {way_out}"
        raise ValueError(said) from error
    if not flops:
        raise ValueError(f"flops_per_sample='measured', and {name}.forward has no matrix product to count. {way_out}")
    return flops / batch_size(example)


def _check(per_sample: object, per_token: float | None, peak: float | None, count_tokens: object) -> None:
    numbers = {"flops_per_sample": per_sample, "flops_per_token": per_token, "peak_flops": peak}
    for name, value in numbers.items():
        if value is None or (name == "flops_per_sample" and value == "measured"):
            continue
        if not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"{name}={value!r} must be a number above 0.")
    if per_sample is not None and per_token is not None:
        raise ValueError(f"flops_per_sample={per_sample!r} and flops_per_token={per_token!r}: give one of them.")
    if per_token is not None and count_tokens is None:
        raise ValueError(f"flops_per_token={per_token!r} needs count_tokens, which says how many tokens a batch has.")


def _wait(trainer: Trainer) -> None:
    device = trainer.strategy.root_device
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
