"""Which pass of a training batch this rank is in."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lightning_hybrid.parallel.engine import Engine
from lightning_hybrid.parallel.pipeline.executor import Step, Work
from lightning_hybrid.parallel.pipeline.run import Result


class PassesUnderWay:
    """Follows the schedule's forward passes; probes, recomputed segments and evaluation are none.

    Args:
        engine: This rank's.

    Attributes:
        is_backward: A backward pass of the schedule is under way.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._now: tuple[int, int] | None = None
        self.is_backward = False
        engine.observers.append(self._observe)

    @property
    def now(self) -> tuple[int, int] | None:
        """(micro-batch, stage); None where nothing of a stage is computed, as before the entry to it."""
        cut = self._engine.cut
        run = cut.keeper.active if cut is not None else None
        return self._now if cut is None or (run is not None and run.entered) else None

    def remove(self) -> None:
        """Follow no more."""
        self._engine.observers.remove(self._observe)

    def _observe(self, step: Step, work: Work) -> Work:
        def forward(stage: int, micro_batch: int, payload: list[Tensor]) -> Result:
            self._now = (micro_batch, stage)
            try:
                return work.forward(stage, micro_batch, payload)
            finally:
                self._now = None

        def before_backward(stage: int, micro_batch: int) -> None:
            work.before_backward(stage, micro_batch)
            self.is_backward = True

        def after_backward(stage: int, micro_batch: int) -> None:
            self.is_backward = False
            work.after_backward(stage, micro_batch)

        return replace(work, forward=forward, before_backward=before_backward, after_backward=after_backward)
