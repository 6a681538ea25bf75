"""How bytes come and go in the course of a training step, by kind and module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lightning_hybrid.functional.memory import shorten, sum_by_module

OUTSIDE = "(outside modules)"
"""Name of what belongs to no module."""
ELSEWHERE = ("recomputed", "offloaded", "compressed")
"""Kinds of bytes that the device would hold, too, were it not for a technique."""


class Change(NamedTuple):
    """More bytes, or fewer.

    Attributes:
        seconds: Since the step began.
        kind: "gradients", "activations" or one of `ELSEWHERE`.
        module: Whose they are; "" for what is outside of modules.
        num_bytes: Negative if they go.
    """

    seconds: float
    kind: str
    module: str
    num_bytes: int


@dataclass
class Timeline:
    """What has been written down of a step; what was there when it began is a change at its start.

    Attributes:
        step: Its number, from 1.
        changes: In order of time.
        phases: When "forward", "backward" or "step" began, each until the next.
        seconds: When the step ended, or its last change was.
        has_ended: Whether all of the step is in it.
    """

    step: int = 1
    changes: list[Change] = field(default_factory=list)
    phases: list[tuple[float, str]] = field(default_factory=list)
    seconds: float = 0.0
    has_ended: bool = False

    def kept(self) -> dict[str, int]:
        """The most bytes of activations that each module had at once, in the order in which modules save any."""
        now = dict.fromkeys((change.module for change in self.changes if change.kind != "gradients"), 0)
        most = dict(now)
        for _, kind, module, num_bytes in self.changes:
            if kind == "activations":
                now[module] += num_bytes
                most[module] = max(most[module], now[module])
        return most

    def spans(self) -> list[tuple[str, float, float]]:
        """(name, start, end) of each phase."""
        ends = [*self.phases, (self.seconds, "")]
        return [(name, start, end) for (start, name), (end, _) in pairwise(ends)]

    def levels(self, groups: Mapping[str, str], columns: int = 1500) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Bytes over time.

        Args:
            groups: Name of the group of each module that has activations, see `group_modules`.
            columns: The step is cut into that many equal spans, and of each the moment is taken at which activations
                and gradients together were largest.

        Returns:
            Times, `[n]` in seconds; and by name, of each group's activations and of each of the other kinds, bytes from
            that moment on, `[n]`. The last time is the end of the step.
        """
        names = [*dict.fromkeys(groups.values()), "gradients", *ELSEWHERE]
        column_of = {name: column for column, name in enumerate(names)}
        steps = np.zeros((len(self.changes) + 2, len(names)), dtype=np.int64)  # a row before, and one for the end
        for row, (_, kind, module, num_bytes) in enumerate(self.changes, start=1):
            steps[row, column_of[groups[module] if kind == "activations" else kind]] += num_bytes
        times = np.array([0.0, *(change.seconds for change in self.changes), self.seconds])
        bytes_at = steps.cumsum(axis=0)
        chosen = _highest(times, bytes_at[:, : -len(ELSEWHERE)].sum(axis=1), columns)
        return times[chosen], {name: bytes_at[chosen, column] for name, column in column_of.items()}


def _highest(times: np.ndarray, heights: np.ndarray, columns: int) -> list[int]:
    """Of each span of time the row with the largest height, the last one of equal ones; and the first and last row."""
    best: dict[int, int] = {}
    for row, (time, height) in enumerate(zip(times[1:-1], heights[1:-1], strict=True), start=1):
        span = int(columns * time / times[-1]) if times[-1] else 0
        if span not in best or height >= heights[best[span]]:
            best[span] = row
    return [0, *sorted(best.values()), len(times) - 1]


def group_modules(num_bytes: Mapping[str, int], depth: int | None = None, most: int = 12) -> dict[str, str]:
    """Groups of modules that a picture can show.

    Args:
        num_bytes: Of each module, in the order in which they run.
        depth: Parts of names that are kept; None for the fewest with which no group that could be divided further has
            more than a third of what such groups have, so that a list of blocks becomes its blocks.
        most: Groups of modules at most; else neighbours are put together, "first ... last", into ones of about equal
            size.

    Returns:
        The name of each module's group; what is outside of modules is a group of its own.
    """
    named = {name: number for name, number in num_bytes.items() if name}
    if depth is None:
        depths = range(1, 1 + max((name.count(".") + 1 for name in named), default=1))
        depth = next((one for one in depths if _is_fine(named, one)), depths[-1])
    merged = _merge(sum_by_module(named, depth), most)
    return {name: merged[shorten(name, depth)] if name else OUTSIDE for name in num_bytes}


def _is_fine(num_bytes: Mapping[str, int], depth: int) -> bool:
    longer = sum_by_module({name: n for name, n in num_bytes.items() if name.count(".") >= depth}, depth)
    return not longer or 3 * max(longer.values()) <= sum(longer.values())


def _merge(num_bytes: dict[str, int], most: int) -> dict[str, str]:
    if len(num_bytes) <= most:
        return {name: name for name in num_bytes}
    runs: list[list[str]] = [[]]
    total, held = sum(num_bytes.values()), 0
    for name, number in num_bytes.items():
        if held * most >= total * len(runs):  # the runs so far have their share
            runs.append([])
        runs[-1].append(name)
        held += number
    return {name: run[0] if len(run) == 1 else f"{run[0]} ... {run[-1]}" for run in runs for name in run}
