"""How high a loss rises in a small box around parameters, and Keskar's sharpness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isfinite
from typing import NamedTuple

import torch
from torch import Tensor

HALVINGS = 8  # how often a step that does not rise is halved


class Ascent(NamedTuple):
    """What an ascent has reached.

    Attributes:
        losses: At the centre, and after each step: every one is higher than the one before.
        offset: From the centre to where the last loss is, in the shapes of the parameters.
    """

    losses: list[float]
    offset: list[Tensor]


def box_of(parameters: Sequence[Tensor], epsilon: float) -> list[Tensor]:
    """Half the sides of the box, ``epsilon * (|x| + 1)`` (Keskar et al. 2017, arXiv:1609.04836, equation 3, A = 1)."""
    return [epsilon * (x.abs() + 1) for x in parameters]


def relative_box_of(parameters: Sequence[Tensor], epsilon: float) -> list[Tensor]:
    """Half the sides of the box, ``epsilon * |x|``, which grows with each weight.

    Source: Kwon et al. 2021, arXiv:2102.11600, section 3, elementwise normalisation with p = infinity.
    """
    return [epsilon * x.abs() for x in parameters]


def ascend(
    loss: Callable[[list[Tensor]], float],
    gradient: Callable[[list[Tensor]], list[Tensor]],
    box: Sequence[Tensor],
    steps: int,
) -> Ascent:
    """Climb in a box from its centre: to the corner that the gradient points to, or part of the way if that is lower.

    A convex function has its maximum at a corner, and a step to the corner that the gradient points to never leads
    down. So a separable one is done after one step, whatever its scale. In general it is a local maximum, or where the
    steps ended.

    Args:
        loss: Of an offset.
        gradient: Likewise, in the shapes of the parameters. What it returns is overwritten.
        box: Half of each side of the box.
        steps: Most steps; each takes one gradient and at least one loss.

    Returns:
        The losses on the way and where the highest is.

    Source: Frank and Wolfe 1956, Naval Research Logistics Quarterly 3; steps are halved here, where a line search was.
    """
    offset = [torch.zeros_like(side) for side in box]
    losses = [loss(offset)]
    while len(losses) <= steps and isfinite(losses[-1]):
        corner = gradient(offset)
        for goal, here, side in zip(corner, offset, box, strict=True):
            goal.copy_(_corner(goal, here, side))
        higher = _higher(loss, losses[-1], offset, corner)
        if higher is None:
            break
        losses.append(higher)
        offset = corner
    return Ascent(losses, offset)


def _corner(gradient: Tensor, offset: Tensor, side: Tensor) -> Tensor:
    """Where a linear function is highest; what it does not depend on stays, or leaves the centre upwards."""
    flat = torch.where(offset == 0, side, offset)  # at a minimum nothing points anywhere
    return torch.where(gradient == 0, flat, gradient.sign() * side)


def _higher(
    loss: Callable[[list[Tensor]], float], lowest: float, offset: Sequence[Tensor], goal: list[Tensor]
) -> float | None:
    """The loss at the goal if it is higher; else the goal comes nearer, in place. None where nothing is higher."""
    if all(torch.equal(there, here) for there, here in zip(goal, offset, strict=True)):
        return None
    for _ in range(HALVINGS):
        found = loss(goal)
        if found > lowest:
            return found
        for there, here in zip(goal, offset, strict=True):
            there.lerp_(here, 0.5)
    return None


def sharpness(centre: float, highest: float) -> float:
    """Rise of a loss in percent, ``100 (highest - centre) / (1 + centre)``; NaN or infinite where they are.

    Raises:
        ValueError: If the loss is -1 or lower, where the measure has no meaning.

    Source: Keskar et al. 2017, arXiv:1609.04836, metric 2.1.
    """
    if centre <= -1:
        raise ValueError(
            f"The loss is {centre:g}, and sharpness is a rise relative to 1 + loss. Measure a loss that is above -1, "
            "such as one without terms that may be negative."
        )
    return 100 * (highest - centre) / (1 + centre) if centre < inf else float("nan")
