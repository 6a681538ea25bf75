"""A picture of what compression saves: bytes before and after, by layer and by how they lie."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import IO, TYPE_CHECKING, Any

from lightning_hybrid.functional.compressing import LayerBytes, group_layers, order_of_code, sum_layers
from lightning_hybrid.functional.memory import byte_unit, byte_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BEFORE, _REST = "#dddddd", "#d55e00"
_COLORS = {  # from a palette for the colour-blind
    "raw": "#777777",
    "bits": "#009e73",
    "argmax": "#f0e442",
    "sparse": "#e69f00",
    "fp16": "#56b4e9",
    "fp10": "#0072b2",
    "fp8": "#cc79a7",
}
_HATCHES = {"sparse": "////", "bits": "....", "argmax": "xxxx"}  # of the first of several words
_MOST_LETTERS = 48


def compression_figure(layers: Mapping[str, LayerBytes], title: str = "saved activations") -> Figure:
    """Draw two bars for each layer: bytes before, and below them bytes after, stacked by how they lie.

    At each pair's end stands how many times smaller it has become. More than 40 layers are put together as by
    `compressing.group_layers`.

    Args:
        layers: By name, in the order in which they save; "" is what is outside of modules.
        title: What is drawn; the totals are added.

    Returns:
        A matplotlib figure, of which pyplot knows nothing.

    Raises:
        ValueError: If no layer has saved anything.
    """
    from matplotlib.figure import Figure  # slow to import; without pyplot nothing global changes, no display is needed

    rows = group_layers(layers)
    if not rows:
        raise ValueError(f"nothing to draw: none of {len(layers)} layers has saved anything.")
    total = sum_layers(rows.values())
    smaller = f", {total.ratio} smaller" if 0 < total.total_after < total.before else ""
    figure = Figure(figsize=(10, 1.7 + 0.34 * len(rows)), layout="constrained")
    axes = figure.subplots()
    _bars(axes, list(rows.values()))
    axes.set_yticks(range(len(rows)), [_label(name) for name in rows], fontsize=8)
    axes.set_title(f"{title}: {byte_words(total.before)} to {byte_words(total.total_after)}{smaller}", fontsize=11)
    figure.legend(loc="outside lower center", ncols=8, frameon=False, fontsize=8)
    return figure


def compression_png(
    layers: Mapping[str, LayerBytes], file: IO[bytes] | str, *, title: str = "saved activations"
) -> None:
    """Write what `compression_figure` draws into an open file, or to a path; it becomes a PNG whatever its name."""
    compression_figure(layers, title).savefig(file, format="png", dpi=120)


def _bars(axes: Any, rows: list[LayerBytes]) -> None:
    longest = [max(row.before, row.total_after) for row in rows]
    unit, size = byte_unit(max(longest))
    places = range(len(rows))
    uppers, lowers = [place - 0.2 for place in places], [place + 0.2 for place in places]
    axes.barh(uppers, [row.before / size for row in rows], 0.38, color=_BEFORE, label="before")
    starts = [0.0] * len(rows)
    for code, num_bytes in sorted(sum_layers(rows).after.items(), key=lambda item: order_of_code(item[0])):
        if num_bytes:
            widths = [row.after.get(code, 0) / size for row in rows]
            axes.barh(lowers, widths, 0.38, starts, label=code, linewidth=0, **_look(code))
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for place, row, end in zip(places, rows, longest, strict=True):
        axes.annotate(row.ratio, (end / size, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set(xlim=(0, max(longest) / size * 1.1), ylim=(len(rows) - 0.5, -0.5), xlabel=f"saved for backward [{unit}]")
    axes.spines[["top", "right"]].set_visible(False)


def _look(code: str) -> dict[str, Any]:
    """The colour of the last word, and of several the hatch of the first."""
    first, *others = code.split()
    look: dict[str, Any] = {"color": _COLORS.get(others[-1] if others else first, _REST)}
    return look | {"hatch": _HATCHES.get(first, "++++"), "edgecolor": "white"} if others else look


def _label(name: str) -> str:
    """A name without its middle, if it is long; of "first ... last", the last without what both begin with."""
    first, *others = name.split(" ... ")
    if others:
        last = others[0].split(".")
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(first.split("."), last, strict=False))
        name = f"{first} ... {'.'.join(last[len(list(shared)) :])}"
    end = _MOST_LETTERS // 2
    return name if len(name) <= _MOST_LETTERS else f"{name[: end - 3]}...{name[-end:]}"
