"""The part of a pipeline's time in which ranks wait for each other."""

from __future__ import annotations

from typing import Literal

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torchmetrics import Metric

from lightning_hybrid.functional.bubbles import Events, bubble_ratio, bubble_share, pipeline_times

CONVENTIONS = {"share": bubble_share, "ratio": bubble_ratio}


class PipelineBubble(Metric):
    """Idle time of a pipeline's ranks over the steps since the last reset, all replicas together.

    Idle is each rank's time between the start of a step's first forward pass and the end of its last backward pass, on
    whichever ranks, in which it runs neither. Waits for transfers count, and so do those for a slower stage. What comes
    after the schedule does not: the rest of the sums over replicas, the optimizer, loading of data.

    Args:
        convention: "share": idle over total time, (p - 1) / (m + p - 1) for p stages of equal time and m micro-batches
            (GPipe, arXiv:1811.06965, section 2.3). "ratio": idle over computing time, (p - 1) / m (Megatron-LM,
            arXiv:2104.04473, section 2.2), which can be above 1.

    Raises:
        ValueError: If the convention is another.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    busy: Tensor
    total: Tensor

    def __init__(self, convention: Literal["share", "ratio"] = "share") -> None:
        super().__init__()
        if convention not in CONVENTIONS:
            raise ValueError(f"convention={convention!r} must be 'share' (of total time) or 'ratio' (to ideal time).")
        self.convention = convention
        for name in ("busy", "total"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, source: Strategy | Events) -> None:
        """Add the last step.

        Args:
            source: `trainer.strategy`, whose `record_timeline` was True during the step; all ranks then call this
                together. A strategy without a pipeline adds nothing. Or the events of one step, in seconds, as
                `strategy.timeline()` and `functional.simulation.simulate` give them.

        Raises:
            RuntimeError: If the strategy has recorded nothing.
            ValueError: If the ranks' clocks differ.
        """
        busy, total = pipeline_times(_events_of(source) if isinstance(source, Strategy) else source)
        self.busy += busy
        self.total += total

    def compute(self) -> Tensor:
        """A float64 scalar, equal on all ranks; 0 without a pipeline."""
        value = CONVENTIONS[self.convention](self.busy.item(), self.total.item())
        return torch.tensor(value, dtype=torch.float64, device=self.busy.device)


def _events_of(strategy: Strategy) -> Events:
    timeline = getattr(strategy, "timeline", None)
    if timeline is None:
        return []
    if not getattr(strategy, "record_timeline", False):
        raise RuntimeError(
            f"{type(strategy).__name__} has not recorded the step: set trainer.strategy.record_timeline = True before "
            "it, as in on_train_start."
        )
    events: Events = timeline()
    return events
