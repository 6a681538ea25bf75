"""What becomes of tensors that autograd saves, told by those who decide it to ledgers that count.

A ledger sees what plain hooks hold. What is held in another way is announced: a tensor that is dropped and made again
later, one that lies in host memory or in fewer bytes meanwhile, one that lies here for a while beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from torch import Tensor

from lightning_hybrid.compat import version

Release = Callable[[], None]
Fate = Literal["kept", "recomputed", "offloaded", "compressed"]
"""Held as it is on the device; dropped until it is made again; held in host memory; dropped for an encoding of it.

What it is encoded in is announced besides, as "kept"."""


class Kept:
    """What a graph holds of a tensor that stays as it is. Ledgers count what is inside."""

    def __init__(self, tensor: Tensor, version: int) -> None:
        self.tensor, self.version = tensor, version

    def unpack(self) -> Tensor:
        """The tensor, by the check that autograd makes where no hooks are.

        Raises:
            RuntimeError: If it has been written to since.
        """
        if version(self.tensor) != self.version:
            raise RuntimeError(
                f"A tensor of shape {list(self.tensor.shape)} that the backward pass needs has been modified in place, "
                f"{version(self.tensor) - self.version} time(s) since it was saved."
            )
        return self.tensor


class FateObserver(Protocol):
    """Who wants to know."""

    def announced(self, tensor: Tensor, fate: Fate, earlier: Release | None = None) -> Release:
        """A tensor has that fate until what is returned is called.

        It belongs to the module that runs, or to that of an earlier announcement, by what was returned then.
        """


observers: list[FateObserver] = []


class Announcement:
    """What has been announced; call it when that ends. A second call does nothing."""

    def __init__(self, told: Sequence[tuple[FateObserver, Release]]) -> None:
        self._told = told

    def __call__(self) -> None:
        """End it for all who were told."""
        for _, release in self._told:
            release()

    def told(self, observer: FateObserver) -> Release | None:
        """What an observer has returned, if it was there."""
        return next((release for one, release in self._told if one is observer), None)


def announce(tensor: Tensor, fate: Fate, earlier: Announcement | None = None) -> Announcement:
    """Tell all ledgers of a saved tensor's fate; whoever announces it calls what is returned when that ends.

    Args:
        tensor: As autograd saves it, or (for "kept") as it lies on the device for a while. Its storage counts, once for
            all its views.
        fate: What becomes of it.
        earlier: What an earlier announcement of the same values returned, whose module it belongs to. Without it that
            is the module that runs, and in a backward pass often none does.
    """
    told = [(one, one.announced(tensor, fate, earlier.told(one) if earlier else None)) for one in observers]
    return Announcement(told)
