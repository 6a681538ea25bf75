"""Writes down how bytes come and go within a step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

from lightning_hybrid.compat import in_backward
from lightning_hybrid.functional.timeline import Change, Timeline
from lightning_hybrid.parallel.ledgers.live import LiveBytes

CHECKS = 16  # entries that are looked at for each that is added, to notice which storages have been freed


class Recorder:
    """Follows counts from its making until `stop`, by the clock of the host.

    Args:
        step: The step's number.
        live: What is followed, by kind.

    Attributes:
        timeline: What has been written down so far.
    """

    def __init__(self, step: int, live: Mapping[str, LiveBytes]) -> None:
        self.timeline = Timeline(step)
        self._live, self._additions = live, 0
        self._start = time.perf_counter()
        for kind, one in live.items():
            one.watch(partial(self._changed, kind))

    def before_adding(self) -> None:
        """Notice what has been freed, every now and then: it goes without a word."""
        self._additions += 1
        if self._additions * CHECKS >= sum(map(len, self._live.values())):
            self._additions = 0
            for one in self._live.values():
                one.prune()

    def phase(self, name: str) -> None:
        """A phase is under way: "forward", "backward" or "step"."""
        if not self.timeline.phases or self.timeline.phases[-1][1] != name:
            self.timeline.phases.append((self._now(), name))

    def stop(self, *, ended: bool = False) -> None:
        """Follow no longer; whether the step has ended."""
        if ended:
            self._now()
            self.timeline.has_ended = True
        for one in self._live.values():
            one.prune()
            one.watch(None)

    def _changed(self, kind: str, module: str, num_bytes: int) -> None:
        if in_backward():
            self.phase("backward")
        elif num_bytes > 0 and kind != "gradients":
            self.phase("forward")
        self.timeline.changes.append(Change(self._now(), kind, module, num_bytes))

    def _now(self) -> float:
        self.timeline.seconds = time.perf_counter() - self._start
        return self.timeline.seconds
