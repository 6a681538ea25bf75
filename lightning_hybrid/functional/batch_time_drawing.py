"""A picture of times of micro-batches by size: throughput with its knee, and times with their line."""

from __future__ import annotations

from typing import IO

from lightning_hybrid.functional.batch_times import BatchTimes


def batch_times_png(times: BatchTimes, file: IO[bytes] | str, knee: int | None) -> None:
    """Draw throughput and time by size.

    Args:
        times: What was measured.
        file: An open file, or its path; it becomes a PNG whatever its name.
        knee: Samples at which a line is drawn; None where the sizes do not reach it.
    """
    from matplotlib.figure import Figure  # slow to import; without pyplot nothing global changes, no display is needed

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    best, (overhead, slope) = max(times.rates), times.line
    left.plot(times.sizes, times.rates, marker=".", label="measured")
    left.axhspan((1 - times.tolerance) * best, best, color="0.9", label=f"within {times.tolerance:.0%} of the best")
    if knee is not None:
        left.axvline(knee, color="tab:red", linestyle="--", label=f"knee: {knee}")
    left.set(xscale="log", xlabel="samples of a micro-batch", ylabel="samples a second", ylim=(0, 1.1 * best))
    left.legend(fontsize=7, loc="lower right")
    right.plot(times.sizes, [1000 * seconds for seconds in times.seconds], ".", label="measured")
    line = [1000 * (overhead + slope * size) for size in times.sizes]
    right.plot(times.sizes, line, color="tab:gray", label=f"{1000 * overhead:.3g} + {1000 * slope:.3g} b")
    right.set(xscale="log", yscale="log", xlabel="samples of a micro-batch, b", ylabel="milliseconds")
    right.legend(fontsize=7)
    figure.savefig(file, format="png", dpi=120)
