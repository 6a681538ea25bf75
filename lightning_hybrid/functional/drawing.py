"""Pictures of a pipeline step: text, Chrome trace and PNG, of simulated or of measured events."""

import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_hybrid.functional.lowering import COMPUTE
from lightning_hybrid.functional.schedules import Action, Kind

Events = Iterable[tuple[int, Action, float, float]]
"""``(rank, action, start, end)``; :class:`~lightning_hybrid.functional.simulation.Event` is such a tuple."""

LEGEND = "F forward, B backward, = goes on, . idle; number: micro-batch; letter: chunk, where a rank has several"
_MAX_CELLS = 1000  # a picture wider than that tells nothing, and a measured event can be very short
_MAX_NUMBERS = 600  # bars with a number in the PNG; more would be unreadable, and slow
_COLORS = {Kind.FORWARD: (0.36, 0.62, 0.86), Kind.BACKWARD: (0.93, 0.60, 0.20)}  # apart for the colour-blind, too


def text_grid(events: Events, slot: float | None = None, width: int | None = None) -> str:
    """Draw compute actions as text: one line a rank, one cell a time slot, in the signs of ``LEGEND``.

    Args:
        events: What ran; transfers are left out.
        slot: Time of one cell; None: of the shortest compute action. Times are rounded to whole cells.
        width: Characters a line; longer pictures go on in a block below. None: one block of any width.

    Returns:
        Lines, each without trailing blanks, joined by newlines.

    Raises:
        ValueError: If there is no compute action that takes time, or ``slot`` is not positive.
    """
    compute, span = _compute_from_zero(events)
    if slot is None:
        slot = max(min(end - start for _, _, start, end in compute if end > start), span / _MAX_CELLS)
    if slot <= 0:
        raise ValueError(f"slot={slot} must be a positive time. Leave it out for the shortest action's.")
    chunks = _chunks(compute)
    ranks = sorted({rank for rank, *_ in compute})
    cells = {rank: ["."] * max(1, round(span / slot)) for rank in ranks}
    for rank, action, start, end in compute:
        first = min(round(start / slot), len(cells[rank]) - 1)
        last = max(first + 1, round(end / slot))
        cells[rank][first:last] = [_label(action, chunks), *["="] * (last - first - 1)]
    size = 1 + max(len(cell) for row in cells.values() for cell in row)
    names = {rank: f"rank {rank}".ljust(len(f"rank {ranks[-1]}")) + " | " for rank in ranks}
    per_block = max(1, (width - len(names[ranks[0]])) // size) if width else _MAX_CELLS * _MAX_CELLS
    blocks = [
        "\n".join((names[r] + "".join(c.ljust(size) for c in cells[r][i : i + per_block])).rstrip() for r in ranks)
        for i in range(0, max(map(len, cells.values())), per_block)
    ]
    return "\n\n".join(blocks)


def chrome_trace(events: Events) -> dict[str, Any]:
    """Make a trace for chrome://tracing or ui.perfetto.dev: one process a rank, compute and communication apart.

    Args:
        events: What ran, in seconds; the units of a simulation become seconds.

    Returns:
        An object for ``json.dump``, times in microseconds as the Trace Event Format asks.
    """
    events = list(events)
    chunks = _chunks(events)
    trace: list[dict[str, Any]] = []
    for rank in sorted({rank for rank, *_ in events}):
        trace.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"pipeline rank {rank}"}})
        for thread, name in enumerate(("compute", "communication")):
            trace.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}})
    for rank, action, start, end in events:
        trace.append(
            {
                "ph": "X",
                "name": f"{action.kind.value} {action.micro_batch}",
                "cat": action.kind.value,
                "pid": rank,
                "tid": int(action.kind not in COMPUTE),
                "ts": start * 1e6,
                "dur": (end - start) * 1e6,
                "args": {"stage": action.stage, "chunk": chunks[action.stage], "micro_batch": action.micro_batch},
            }
        )
    return {"traceEvents": trace, "displayTimeUnit": "ms"}


def timeline_png(events: Events, path: str | Path, title: str = "", unit: str = "") -> None:
    """Draw compute actions as bars: one row a rank, forward and backward in two colours, later chunks paler.

    Args:
        events: What ran; transfers are left out.
        path: File to write, as PNG whatever its name.
        title: Text above the picture.
        unit: Unit of the time axis, such as "s"; simulated times have none.

    Raises:
        ValueError: If there is no compute action that takes time.
    """
    from matplotlib.figure import Figure  # slow to import; without pyplot nothing global changes, no display is needed
    from matplotlib.patches import Patch

    compute, span = _compute_from_zero(events)
    chunks, num_ranks = _chunks(compute), 1 + max(rank for rank, *_ in compute)
    num_chunks = 1 + max(chunks.values())
    figure = Figure(figsize=(min(24, 6 + len(compute) / num_ranks / 3), 1.6 + 0.45 * num_ranks), layout="constrained")
    axes = figure.add_subplot()
    for rank, action, start, end in compute:
        color = _shade(action.kind, chunks[action.stage], num_chunks)
        axes.broken_barh([(start, end - start)], (rank - 0.4, 0.8), facecolors=color, edgecolor="white", linewidth=0.5)
        if len(compute) <= _MAX_NUMBERS:
            axes.text((start + end) / 2, rank, str(action.micro_batch), ha="center", va="center", fontsize=7)
    axes.set(xlim=(0, span), ylim=(num_ranks - 0.5, -0.5), yticks=range(num_ranks), title=title)
    axes.set(xlabel=f"time [{unit}]" if unit else "time", ylabel="pipeline rank")
    shades = [(kind, chunk) for kind in COMPUTE for chunk in range(num_chunks)]
    names = [kind.value + (f", chunk {chunk}" if num_chunks > 1 else "") for kind, chunk in shades]
    patches = [Patch(color=_shade(*shade, num_chunks), label=name) for shade, name in zip(shades, names, strict=True)]
    figure.legend(handles=patches, loc="outside lower center", ncols=min(6, len(patches)), frameon=False)
    figure.savefig(path, format="png", dpi=120)


def _compute_from_zero(events: Events) -> tuple[list[tuple[int, Action, float, float]], float]:
    compute = sorted((e for e in events if e[1].kind in COMPUTE), key=lambda event: event[2])
    origin = min((start for _, _, start, _ in compute), default=0.0)
    span = max((end for _, _, _, end in compute), default=0.0) - origin
    if span <= 0:
        raise ValueError(f"nothing to draw: {len(compute)} compute actions take {span} in all. Pass events with times.")
    return [(rank, action, start - origin, end - origin) for rank, action, start, end in compute], span


def _chunks(events: Events) -> dict[int, int]:
    """Number the stages that each rank holds; needs no number of ranks, which one rank's own events do not tell."""
    stages: dict[int, set[int]] = {}
    for rank, action, *_ in events:
        stages.setdefault(rank, set()).add(action.stage)
    return {stage: chunk for held in stages.values() for chunk, stage in enumerate(sorted(held))}


def _label(action: Action, chunks: dict[int, int]) -> str:
    sign = "F" if action.kind is Kind.FORWARD else "B"
    letter = string.ascii_lowercase[chunks[action.stage] % 26] if any(chunks.values()) else ""
    return f"{sign}{action.micro_batch}{letter}"


def _shade(kind: Kind, chunk: int, num_chunks: int) -> tuple[float, float, float]:
    paler = 0.6 * chunk / num_chunks
    red, green, blue = (part + (1 - part) * paler for part in _COLORS[kind])
    return red, green, blue
