"""Counts of the steps that optimizers have applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class AppliedSteps:
    """Counts, for each optimizer of a fit, the steps that it has applied; one that a scaler skips does not count.

    `RateFactors.steps` go on with their optimizer over several fits; these begin anew in each.

    Attributes:
        counts: Of each optimizer, in order.
    """

    def __init__(self) -> None:
        self.counts: list[int] = []
        self._saved: list[int] | None = None
        self._handles: list[RemovableHandle] = []

    def reset(self) -> None:
        """Forget a fit that has ended; call it in `setup`, before a checkpoint is restored."""
        self.stop()
        self.counts, self._saved = [], None

    def restore(self, counts: Sequence[int]) -> None:
        """Go on from a checkpoint's counts: when `start` is called, or at once where steps are counted already."""
        if self.runs:
            self.counts[:] = counts
        else:
            self._saved = list(counts)

    @property
    def runs(self) -> bool:
        """Whether steps are counted."""
        return bool(self._handles)

    def start(
        self, optimizers: Sequence[Optimizer], callback: str, after: Callable[[int], object] | None = None
    ) -> None:
        """Begin to count; call it in `on_train_start`.

        Args:
            optimizers: Those of the fit.
            callback: Who counts, for the error.
            after: Called with an optimizer's number after each step, before that is counted.

        Raises:
            ValueError: If a checkpoint has counts of another number of optimizers.
        """
        counts = self._saved or [0] * len(optimizers)  # a checkpoint of no fit has none
        if len(counts) != len(optimizers):
            raise ValueError(
                f"The checkpoint has the steps of {len(counts)} optimizers for {callback}, and configure_optimizers "
                f"has returned {len(optimizers)}. Return as many as were saved, or load the weights alone "
                "(load_from_checkpoint)."
            )
        self.counts, self._saved = list(counts), None
        for number, optimizer in enumerate(optimizers):
            self._handles.append(optimizer.register_step_post_hook(partial(self._count, number, after)))

    def state(self) -> list[int]:
        """For a checkpoint: what has been counted, or restored and not used yet."""
        return list(self.counts if self._saved is None else self._saved)

    def stop(self) -> None:
        """Count no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _count(self, number: int, after: Callable[[int], object] | None, optimizer: Optimizer, *_: Any) -> None:
        if after is not None:
            after(number)
        self.counts[number] += was_applied(optimizer)


def was_applied(optimizer: Optimizer) -> bool:
    """Whether a step that has just ended counts: fused optimizers skip inside, where a scaler has found an overflow."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is None or not found_inf.item()
