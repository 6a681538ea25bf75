"""Whether replicas have called the same modules of units in the same order: `fully_shard` takes that for granted.

Where they have not, one replica's gather of a unit meets another's of some other unit. If both are of one size nothing
fails, and the numbers are wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn

RANGE = 2**20  # of a digest: the sum of squares over all replicas fits into 64 bits


class Calls:
    """The calls of modules in one replica's step."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._count = 0

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Note each call of these modules from now on; all replicas watch the same ones in one order."""
        for module in modules:
            module.register_forward_pre_hook(partial(_note, self._numbers, self._count))
            self._count += 1

    def clear(self) -> None:
        """A step begins."""
        self._numbers.clear()

    def digest(self) -> list[int]:
        """Two numbers to be summed over the replicas."""
        value = hash(tuple(self._numbers)) % RANGE
        return [value, value**2]

    @staticmethod
    def check(sums: list[int], size: int, zero_stage: int) -> None:
        """Look at the sums of the digests, which all replicas have alike.

        Args:
            sums: Of the digests.
            size: Number of replicas.
            zero_stage: For the message.

        Raises:
            RuntimeError: If the replicas' digests differ: their variance is not 0.
        """
        total, squares = sums
        if total**2 != squares * size:
            raise RuntimeError(
                "Replicas called different blocks in this step, or the same in another order, and with "
                f"zero_stage={zero_stage} parameters are gathered as they are called. Let all replicas drop the same "
                "layers, drop them inside the block's forward, or set zero_stage to 0 or 1."
            )


def _note(numbers: list[int], number: int, *_: Any) -> None:
    numbers.append(number)
