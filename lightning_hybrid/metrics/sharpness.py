"""How much the loss rises in a small box around the parameters."""

from __future__ import annotations

from math import isfinite
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hybrid.functional.ascent import ascend, box_of, relative_box_of, sharpness
from lightning_hybrid.metrics.surface import SurfaceMetric

BOXES = {"box": box_of, "scale_invariant": relative_box_of}


class Sharpness(SurfaceMetric):
    """Sharpness of a minimum: the largest rise of the loss in a box around the parameters, in percent of 1 + loss.

    It is 100 (max f(x + y) - f(x)) / (1 + f(x)) over all y with abs(y) <= epsilon (abs(x) + 1). The maximum is searched
    from the centre, to the corner that the gradient points to and on from there while the loss rises, so that the value
    is a lower bound: exact where the loss is convex and separable, as near a minimum with a diagonal Hessian.

    A ReLU network computes the same with weights (a W1, W2 / a), but not in the same box, so that the measure can be
    made as large as one likes without another function (Dinh et al. 2017, arXiv:1703.04933, section 4). Compare only
    runs that are trained alike, and look at `kind="scale_invariant"` too, which does not change: its box is
    abs(y) <= epsilon abs(x).

    Besides the parameters it takes memory for four copies of them, and for one backward pass of one batch. A step costs
    a forward and a backward pass over all batches, and one or more forward passes.

    Args:
        epsilon: Half the side of the box, relative; Keskar et al. take 1e-3 and 5e-4.
        kind: "box", or "scale_invariant" with a box in which weights of 0 do not move.
        steps: Most steps of the search.
        kwargs: Of `torchmetrics.Metric`.

    Attributes:
        losses: Those of the last `compute`, at the centre and after each step that rose.

    Raises:
        ValueError: If `epsilon` is not above 0, `kind` is another, or `steps` is below 1. In `compute`, if the closure
            is not repeatable, the loss is -1 or lower, or only some ranks have a batch.

    Source: Keskar et al. 2017, arXiv:1609.04836, section 2.2.2, metric 2.1 with A = 1, where L-BFGS-B searches; Kwon et
    al. 2021, arXiv:2102.11600, section 3.
    """

    def __init__(
        self,
        epsilon: float = 1e-3,
        kind: Literal["box", "scale_invariant"] = "box",
        steps: int = 10,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not (isfinite(epsilon) and epsilon > 0):
            raise ValueError(f"epsilon={epsilon!r} must be finite and above 0, such as 1e-3.")
        if kind not in BOXES:
            raise ValueError(f"kind={kind!r} is neither of {', '.join(map(repr, BOXES))}.")
        if steps < 1:
            raise ValueError(f"steps={steps!r} must be at least 1.")
        self.epsilon, self.kind, self.steps = epsilon, kind, steps
        self.losses: list[float] = []

    @override
    def compute(self) -> Tensor:
        """Measure the batches of all ranks, at the parameters as they are now; NaN without a batch."""
        with self.opened() as surface:
            if surface is None:
                return torch.tensor(float("nan"), device=self.device)
            box = BOXES[self.kind](surface.parameters, self.epsilon)
            found, like = ascend(surface.loss, surface.gradient, box, self.steps), surface.parameters[0]
        self.losses = found.losses  # after the context, which puts attributes back
        return torch.tensor(sharpness(found.losses[0], found.losses[-1]), dtype=like.dtype, device=like.device)
