"""A picture of a training step: bytes over time, stacked by what they are for and by module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from lightning_hybrid.functional.memory import byte_unit, byte_words
from lightning_hybrid.functional.timeline import OUTSIDE, Timeline, group_modules

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PHASES = {  # in the colours of pictures of schedules
    "forward": ("forward", "#5c9edb"),
    "backward": ("backward", "#ed9933"),
    "step": ("optimizer step", "#a6a6a6"),
}
_ELSEWHERE = {
    "offloaded": ("in host memory", "#0072b2", "-"),
    "recomputed": ("dropped, to be recomputed", "#d55e00", "--"),
    "compressed": ("compressed, bytes before", "#009e73", "-."),
}
_GRADIENTS, _REST = "#cc79a7", "#bbbbbb"  # with the lines' colours from a palette for the colour-blind


def memory_figure(timeline: Timeline, depth: int | None = None, beside: Mapping[str, int] | None = None) -> Figure:
    """Draw a step as stacked areas: activations that are kept, by groups of modules, and above them gradients.

    A strip on top shows when the step runs forward and backward. Where activations are offloaded, recomputed or
    compressed, their bytes have a panel of their own below; what they are compressed to is among what is kept.

    Args:
        timeline: Of a step in which something was kept.
        depth: Parts of modules' names that are kept apart; None for what `group_modules` finds.
        beside: Bytes that are there for the whole step and not drawn, by name, for the title.

    Returns:
        A matplotlib figure, of which pyplot knows nothing.

    Raises:
        ValueError: If nothing has changed in the step, or it took no time.
    """
    from matplotlib.figure import Figure  # slow to import; without pyplot nothing global changes, no display is needed

    if not timeline.changes or timeline.seconds <= 0:
        raise ValueError(f"nothing to draw: {len(timeline.changes)} changes in {timeline.seconds} seconds.")
    times, levels = timeline.levels(group_modules(timeline.kept(), depth))
    elsewhere = {name: level for name in _ELSEWHERE if (level := levels.pop(name)).any()}
    heights = [3, 1] if elsewhere else [3]
    figure = Figure(figsize=(10, 1.4 + 1.3 * sum(heights)), layout="constrained")
    above, *below = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    _stack(above, times * 1000, {name: level for name, level in levels.items() if level.any()})
    _strip(above, timeline)
    above.set_title(_title(timeline, beside or {}), pad=25, fontsize=11)
    for axes in below:
        _lines(axes, times * 1000, elsewhere)
    [above, *below][-1].set(xlim=(0, timeline.seconds * 1000), xlabel="time in the step [ms]")
    return figure


def memory_png(
    timeline: Timeline, file: IO[bytes] | str, *, depth: int | None = None, beside: Mapping[str, int] | None = None
) -> None:
    """Write what `memory_figure` draws into an open file, or to a path; it becomes a PNG whatever its name."""
    memory_figure(timeline, depth, beside).savefig(file, format="png", dpi=120)


def _title(timeline: Timeline, beside: Mapping[str, int]) -> str:
    title = f"memory in step {timeline.step}" + ("" if timeline.has_ended else ", which has not ended")
    sizes = [f"{name} {byte_words(num_bytes)}" for name, num_bytes in beside.items() if num_bytes]
    return title + (f", on top of {', '.join(sizes)}" if sizes else "")


def _stack(axes: Any, times: np.ndarray, levels: dict[str, np.ndarray]) -> None:
    total = sum(levels.values(), np.zeros(len(times)))
    peak, when = total.max(), times[int(total.argmax())]
    unit, size = byte_unit(peak)
    areas = axes.stackplot(times, *(level / size for level in levels.values()), step="post", linewidth=0.3)
    for area, (name, color) in zip(areas, _colors(levels).items(), strict=True):
        area.set(facecolor=color, edgecolor="white", hatch="///" if name == "gradients" else None)
        area.set_label(name)
    axes.axhline(peak / size, color="black", linewidth=0.8, linestyle=":")
    side = "left" if when < times[-1] / 2 else "right"
    axes.annotate(
        f"peak {byte_words(peak)}", (when, peak / size), (0, 3), textcoords="offset points", ha=side, fontsize=8
    )
    axes.set(ylim=(0, peak / size * 1.1), ylabel=f"kept on the device [{unit}]")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)


def _colors(names: Iterable[str]) -> dict[str, Any]:
    """From dark to light for groups of modules in their order, which a grey print keeps apart too."""
    from matplotlib import colormaps

    modules = [name for name in names if name not in ("gradients", OUTSIDE)]
    shades = colormaps["viridis"](np.linspace(0.05, 0.95, max(2, len(modules))))
    of_module = dict(zip(modules, shades, strict=False))
    return {name: of_module.get(name, _GRADIENTS if name == "gradients" else _REST) for name in names}


def _strip(axes: Any, timeline: Timeline) -> None:
    """Phases, in a strip above the axes: with words where there is room, else with a legend."""
    from matplotlib.patches import Patch

    transform, spans = axes.get_xaxis_transform(), timeline.spans()
    unnamed = dict.fromkeys(name for name, *_ in spans)
    for name, start, end in spans:
        words, color = _PHASES[name]
        bar = [(start * 1000, (end - start) * 1000)]
        axes.broken_barh(bar, (1.01, 0.06), facecolors=color, transform=transform, clip_on=False)
        if end - start > timeline.seconds * len(words) / 80:
            axes.text((start + end) * 500, 1.04, words, transform=transform, ha="center", va="center", fontsize=8)
            unnamed.pop(name, None)
    if unnamed:
        patches = [Patch(color=_PHASES[name][1], label=_PHASES[name][0]) for name in unnamed]
        axes.figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=8)


def _lines(axes: Any, times: np.ndarray, levels: dict[str, np.ndarray]) -> None:
    most = max(level.max() for level in levels.values())
    unit, size = byte_unit(most)
    for name, level in levels.items():
        words, color, style = _ELSEWHERE[name]
        axes.step(times, level / size, where="post", color=color, linestyle=style, label=words)
        axes.fill_between(times, level / size, step="post", color=color, alpha=0.15, linewidth=0)
    axes.set(ylim=(0, most / size * 1.15), ylabel=f"elsewhere [{unit}]")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
