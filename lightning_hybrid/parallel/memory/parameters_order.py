"""Which unit of parameters is read after which: recorded in one iteration, expected in the next one of its kind."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class AccessOrder(Generic[Key]):
    """The order of accesses in the iteration under way, and in the one before of the same kind.

    What is expected is a guess, and accesses that were not expected are recorded all the same: another order costs
    time in one iteration, and is expected in the next.

    Source: Cui et al. 2016, GeePS (EuroSys), section 4.1: a first iteration that shows the sequence of accesses.
    """

    def __init__(self) -> None:
        self._recorded: dict[str, list[Key]] = {}
        self._kind, self._now, self._place = "", list[Key](), 0

    def begin(self, kind: str) -> None:
        """A new iteration.

        Args:
            kind: Such as "train" or "validate", which have orders of their own.
        """
        if self._now:
            self._recorded[self._kind] = self._now
        self._kind, self._now, self._place = kind, [], 0

    def note(self, unit: Key) -> bool:
        """A unit is read; returns whether another one, or none, was read before."""
        if self._now and self._now[-1] == unit:
            return False
        self._now.append(unit)
        for place in range(self._place, len(self._expected)):
            if self._expected[place] == unit:
                self._place = place + 1  # units in between were left out
                break
        return True

    def ahead(self, number: int) -> list[Key]:
        """The unit read last, and those expected after it: at most that many different ones."""
        coming = dict.fromkeys(self._now[-1:])
        for unit in self._expected[self._place :]:
            if len(coming) >= number:
                break
            coming.setdefault(unit)
        return list(coming)

    @property
    def _expected(self) -> list[Key]:
        return self._recorded.get(self._kind, [])
