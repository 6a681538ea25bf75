"""Where one forward pass ends and the next begins, told to what works on a pass.

A step may run several, whose backward passes come later and in another order: micro-batches of a pipeline's stages.
Under a strategy that tells nothing, a batch is one pass.
"""

from __future__ import annotations

from collections.abc import Callable

observers: list[Callable[[bool], None]] = []
"""Who wants to know; each is told whether a backward pass will follow, which none does after a probe."""


def begin_pass(*, trained: bool = True) -> None:
    """What follows in this thread belongs to another forward pass."""
    for observer in observers:
        observer(trained)
