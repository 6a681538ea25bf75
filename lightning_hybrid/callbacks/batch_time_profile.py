"""From which size on a larger micro-batch pays nothing, and how long replicas exchange gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.memory import garbage_collection_cuda, is_oom_error
from rich.table import Table
from typing_extensions import override

from lightning_hybrid.callbacks.arguments import check_whole
from lightning_hybrid.callbacks.global_batch import count_samples, num_replicas
from lightning_hybrid.callbacks.pictures import Picture, picture_path, write_picture
from lightning_hybrid.callbacks.reports import show
from lightning_hybrid.callbacks.step_alone import StepAlone, refuse_parts
from lightning_hybrid.functional.batch_time_drawing import batch_times_png
from lightning_hybrid.functional.batch_times import BatchTimes, default_sizes, exchange_ratio
from lightning_hybrid.functional.traffic import ring_bytes
from lightning_hybrid.parallel.ledgers.traffic import over_ranks, uncounted
from lightning_hybrid.parallel.pipeline.microbatch import take_samples

FILE = "batch_times.png"


class BatchTimeProfile(Callback):
    """Measures t(b), the time of a micro-batch's forward and backward by its size, before the first step of `fit`.

    With the first batch it runs `training_step` at sizes 1, 2, 4 and so on, made of the first samples, which are
    repeated where more are wanted. The training that follows is the same to the bit: gradients, buffers, metrics,
    random streams and logs are as if nothing had happened. Rank 0 prints a table and what follows from it:

    - The knee: fewest samples whose throughput b / t(b) is within a tolerance of the best. Larger micro-batches pay
      less than that; a larger batch is better made by accumulation.
    - The line a + c b through the times: a is paid for each micro-batch, c for each sample.
    - With N replicas, the ratio of a sum of gradients of S bytes to the micro-batches of a step,
      2 (N - 1) / N S / bandwidth over K t(b): accumulating more micro-batches, K, makes it smaller. The sum is measured
      alone; where it runs beside the backward pass, less of it is waited for.

    It works with "auto" and "ddp", and under `hybrid_ptdp` where each rank has the whole model. All ranks run the same
    sizes and the slowest one's time counts. Where a size needs too much memory the profile ends.

    Args:
        sizes: Samples of a micro-batch, ascending; None for powers of two up to `max_size`, and that. Those of a model
            with batch normalisation, which may need two samples, begin with 2.
        max_size: The largest of them; None for this rank's first batch.
        repeats: Measurements of each size, after one that does not count; their median is taken.
        tolerance: Share of throughput that does not matter.
        picture: A path, which ends in ".png" or is a folder; True for `batch_times.png` in the logger's folder, or
            without a logger in `default_root_dir`; False for none.
        clock: Gives seconds.

    Attributes:
        times: What was measured, the same on all ranks; None before.
        exchange: Seconds of a sum of all gradients over the replicas; 0 with one of them.
        ratio: Of that to the micro-batches of a step.
        too_large: Size that needed too much memory, if one did.

    Raises:
        ValueError: If an argument is out of range; before training, where a step cannot run by itself.
    """

    def __init__(
        self,
        sizes: Sequence[int] | None = None,
        max_size: int | None = None,
        repeats: int = 3,
        tolerance: float = 0.1,
        picture: Picture = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_whole("repeats", repeats, 1)
        if max_size is not None:
            check_whole("max_size", max_size, 1, " of samples")
        if sizes is not None and (isinstance(sizes, str | int | float) or not sizes):
            raise ValueError(f"sizes={sizes!r} must be a list of numbers of samples, such as [8, 16, 32].")
        for size in sizes or ():
            check_whole("each number in sizes", size, 1, " of samples")
        if sizes is not None and list(sizes) != sorted(set(sizes)):
            raise ValueError(f"sizes={list(sizes)} must ascend.")
        if sizes is not None and max_size is not None:
            raise ValueError(f"sizes={list(sizes)} and max_size={max_size}: give one of them.")
        BatchTimes([1], [1.0], tolerance)
        picture_path(picture, FILE)
        self.sizes, self.max_size, self.repeats, self.tolerance = sizes, max_size, repeats, tolerance
        self.picture, self.clock = picture, clock
        self.times: BatchTimes | None = None
        self.exchange = self.ratio = 0.0
        self.too_large: int | None = None
        self._path, self._is_due = "", False

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        refuse_parts(trainer, pl_module, type(self).__name__)
        self._path = picture_path(self.picture, FILE, trainer)
        self._is_due = True

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._is_due:
            return
        self._is_due, self.times, self.too_large = False, None, None
        alone = StepAlone(trainer, pl_module)
        of_batch = min(over_ranks(count_samples(batch)))
        sizes = self.sizes or default_sizes(self.max_size or of_batch, alone.least)
        with alone.kept():
            self._measure(alone, batch, batch_idx, sizes)
        self._compare(trainer, alone, of_batch)
        show(trainer, self.table())
        if self._path and trainer.is_global_zero and self.times is not None:
            times = self.times
            write_picture(self._path, lambda file: batch_times_png(times, file, self.knee), type(self).__name__)
        self._log(pl_module)

    @property
    def knee(self) -> int | None:
        """Samples at the knee; None before, and where larger sizes than those measured would pay."""
        if self.times is None or self.times.line[1] <= 0:
            return None
        is_open = self.times.headroom > self.tolerance and self.too_large is None
        return None if is_open else self.times.knee

    def table(self) -> Table:
        """Times by size, and what follows."""
        table = Table(
            title="Time of a micro-batch by its size, forward and backward", caption="\n".join(self.verdict())
        )
        for name in ("samples", "milliseconds", "samples a second", "of the best"):
            table.add_column(name, justify="right")
        if self.times is not None:
            best = max(self.times.rates)
            for size, seconds, rate in zip(self.times.sizes, self.times.seconds, self.times.rates, strict=True):
                table.add_row(f"{size}", f"{1000 * seconds:,.3f}", f"{rate:,.1f}", f"{rate / best:.1%}")
        return table

    def verdict(self) -> list[str]:
        """What the times say, in sentences."""
        said = [] if self.too_large is None else [f"A micro-batch of {self.too_large} needs too much memory."]
        if self.times is None:
            return said
        overhead, slope = self.times.line
        said.append(f"t(b) is about {1000 * overhead:.3g} ms + {1000 * slope:.3g} ms b.")
        larger = "larger sizes" if self.sizes else "a larger max_size"
        if slope <= 0:
            said[-1] = f"Times do not grow with the size: give {larger}, or more repeats, to see where they do."
        elif self.knee is None:
            reached = f"{self.times.sizes[-1]} samples have {1 - self.times.headroom:.0%} of the throughput"
            said.append(f"{reached} that the line promises for endless ones: give {larger} to see the knee.")
        else:
            said.append(f"From {self.knee} samples on, a larger micro-batch pays less than {self.tolerance:.0%}.")
        if self.exchange:
            took = f"{1000 * self.exchange:.3g} ms"
            said.append(f"A sum of all gradients takes {took}, {self.ratio:.2f} of the compute of a step.")
        return said

    def _measure(self, alone: StepAlone, batch: Any, batch_idx: int, sizes: Sequence[int]) -> None:
        """Sizes in turn; all ranks stop where one of them lacks memory."""
        measured: dict[int, float] = {}
        for size in sizes:
            rows = over_ranks(self._seconds(alone, batch, batch_idx, size))
            if None in rows:
                self.too_large = size
                garbage_collection_cuda()
                break
            measured[size] = max(rows)
            rank_zero_info(f"BatchTimeProfile: {size} of {sizes[-1]} samples take {1000 * measured[size]:.3g} ms")
        self.times = BatchTimes(list(measured), list(measured.values()), self.tolerance) if measured else None

    def _seconds(self, alone: StepAlone, batch: Any, batch_idx: int, size: int) -> float | None:
        """Median on this rank; None if the memory does not do."""
        try:
            found = [self._once(alone, batch, batch_idx, size) for _ in range(1 + self.repeats)]
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or is_oom_error(error):
                return None
            raise
        return median(found[1:])

    def _once(self, alone: StepAlone, batch: Any, batch_idx: int, size: int) -> float:
        with alone.unseen():
            own = take_samples(batch, size)  # each time, since a step may write to its batch
            alone.wait()
            start = self.clock()
            alone.run(own, batch_idx)
            alone.wait()
            return self.clock() - start

    def _compare(self, trainer: Trainer, alone: StepAlone, of_batch: int) -> None:
        """Time the exchange of gradients, and set it beside the compute of a step as it is configured."""
        replicas, self.exchange, self.ratio = num_replicas(trainer), 0.0, 0.0
        if replicas == 1 or self.times is None:
            return
        gradients, found = alone.gradients, []
        for _ in range(1 + self.repeats):
            with uncounted():
                dist.barrier()
                alone.wait()
                start = self.clock()
                dist.all_reduce(gradients)
                alone.wait()
            found.append(self.clock() - start)
        self.exchange = max(over_ranks(median(found[1:])))
        parts = getattr(trainer.strategy, "options", {}).get("num_microbatches", 1)
        parts = parts if isinstance(parts, int) else 1
        if self.exchange:
            self.ratio = exchange_ratio(
                gradients.nbytes,
                num_ranks=replicas,
                bandwidth=ring_bytes("all_reduce", gradients.nbytes, replicas) / self.exchange,
                seconds=self.times.at(max(1, of_batch // parts)),
                num_microbatches=parts * trainer.accumulate_grad_batches,
            )

    def _log(self, pl_module: LightningModule) -> None:
        if self.times is None:
            return
        overhead, slope = self.times.line
        values = {"overhead_seconds": overhead, "seconds_per_sample": slope}
        if self.knee is not None:
            values["knee"] = self.knee
        if self.exchange:
            values["exchange_ratio"] = self.ratio
        for name, value in values.items():
            pl_module.log(f"batch_time/{name}", torch.tensor(value, dtype=torch.float64), batch_size=1)
