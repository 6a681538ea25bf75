"""A picture of how evenly experts were used: layers by experts, and each layer's experts over the steps."""

from __future__ import annotations

from typing import IO, Any

import numpy as np

from lightning_hybrid.functional.loads import LoadHistory, Routed

_MOST_LAYERS = 48  # of which each has a strip over the steps; more would make a picture that nothing shows
_MOST_NUMBERS = 16  # in a row; more would overlap


def loads_png(history: LoadHistory, file: IO[bytes] | str) -> None:
    """Draw heat maps of load times E, which is 1 where experts are used evenly.

    The upper one has a row for each layer and a column for each expert, over the whole history; below, each layer has
    one with a row for each expert and a column for each window. Of more than 48 layers, those of the largest
    imbalance have theirs.

    Args:
        history: Not empty.
        file: An open file, or its path; it becomes a PNG whatever its name.

    Raises:
        ValueError: If nothing was routed.
    """
    from matplotlib.figure import Figure  # slow to import; without pyplot nothing global changes, no display is needed

    total = {name: routed for name, routed in history.total().items() if routed.num_pairs}
    if not total:
        raise ValueError("nothing to draw: no layer has routed a token.")
    most_uneven = sorted(total, key=lambda name: total[name].imbalance, reverse=True)[:_MOST_LAYERS]
    strips = [name for name in total if name in most_uneven]
    heights = [0.5 + 0.3 * len(total), *(0.7 + 0.06 * min(max(8, len(total[name].counts)), 32) for name in strips)]
    figure = Figure(figsize=(9, sum(heights) + 0.6), layout="constrained")
    whole, *rows = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    most = max(2.0, *(routed.imbalance for routed in total.values()))
    scale: dict[str, Any] = {"cmap": "cividis", "vmin": 0, "vmax": most}
    image = whole.imshow(_by_layer(total), aspect="auto", interpolation="nearest", **scale)
    _number_cells(whole, list(total.values()), most)
    whole.set(title="load of each expert, in units of even load", xlabel="expert")
    whole.set_yticks(range(len(total)), list(total), fontsize=7)
    steps = [step for step, _ in history.windows]
    edges = [_begin(steps), *steps]
    for name, row in zip(strips, rows, strict=True):
        num_experts = len(total[name].counts)
        row.pcolormesh(edges, np.arange(num_experts + 1) - 0.5, _by_window(history, name, num_experts), **scale)
        row.set_ylim(num_experts - 0.5, -0.5)
        row.set_ylabel("expert", fontsize=7)
        row.set_title(f"{name}: {_words(total[name])}", fontsize=8, loc="left")
        row.tick_params(labelsize=7)
    rows[-1].set_xlabel("optimizer step")
    figure.colorbar(image, ax=[whole, *rows], aspect=40, pad=0.02)
    figure.savefig(file, format="png", dpi=110)


def _by_layer(total: dict[str, Routed]) -> np.ndarray:
    """[layers, most experts], NaN where a layer has fewer."""
    cells = np.full((len(total), max(len(routed.counts) for routed in total.values())), np.nan)
    for row, routed in zip(cells, total.values(), strict=True):
        row[: len(routed.counts)] = np.array(routed.load) * len(routed.counts)
    return cells


def _by_window(history: LoadHistory, name: str, num_experts: int) -> np.ndarray:
    """[experts, windows], NaN where the layer routed nothing."""
    windows = [layers.get(name) for _, layers in history.windows]
    columns = [w.load if w is not None and w.num_pairs else [np.nan] * num_experts for w in windows]
    return np.array(columns).T * num_experts


def _number_cells(axes: Any, layers: list[Routed], most: float) -> None:
    if max(len(routed.counts) for routed in layers) > _MOST_NUMBERS:
        return
    for row, routed in enumerate(layers):
        for column, share in enumerate(routed.load):
            load = share * len(routed.counts)
            color = "white" if load < most / 2 else "black"
            axes.text(column, row, f"{load:.2f}", ha="center", va="center", fontsize=7, color=color)


def _begin(steps: list[int]) -> float:
    """Where the first window begins: as far before its end as the second's."""
    return max(0, 2 * steps[0] - steps[1]) if len(steps) > 1 else min(0, steps[0] - 1)


def _words(routed: Routed) -> str:
    return (
        f"largest load {routed.imbalance:.2f} of even, {routed.dropped_share:.1%} dropped, "
        f"entropy {routed.mean_entropy:.2f} nats"
    )
