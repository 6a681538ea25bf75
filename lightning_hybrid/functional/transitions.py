"""How much of a step one of two optimizers makes, while training goes over from one to the other.

The weights here are those of the second; the first has the rest. Positions may be epochs, steps or anything else that
counts up, if all arguments count the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial


def transition_weight(at: float, center: float, period: float) -> float:
    """Weight of the second optimizer: exponential before the center, then a straight line of the same slope.

    It is ``exp(2 (at - center) / period) / 2`` before the center, ``1 / 2 + (at - center) / period`` for half a period
    from there, and 1 after that.

    Args:
        at: Position.
        center: Where both have the same weight.
        period: Above 0.

    Returns:
        From 0 to 1; it never falls from one position to a later one.

    Source: Akiba, Suzuki and Fukuda, Extremely Large Minibatch SGD: Training ResNet-50 on ImageNet in 15 Minutes
        (2017), arXiv:1711.04325. The line in circulation is twice as steep: see `literal_transition_weight`.
    """
    if at < center:
        return 0.5 * math.exp(2 * (at - center) / period)
    return min(0.5 + (at - center) / period, 1.0) if at < center + period / 2 else 1.0


def literal_transition_weight(at: float, center: float, period: float) -> float:
    """As `transition_weight`, with the line that circulates, ``1 / 2 + 2 (at - center) / period``.

    It reaches 1 a quarter of the period after the center, goes on to 1.5, and falls to 1 at its half. Meanwhile the
    first optimizer has a negative weight: it goes back where it would have gone.

    Args:
        at: Position.
        center: Where both have the same weight.
        period: Above 0.
    """
    return (
        0.5 + 2 * (at - center) / period
        if center <= at < center + period / 2
        else transition_weight(at, center, period)
    )


def linear_weight(at: float, begin: float, end: float) -> float:
    """Weight of the second optimizer: 0 up to a position, 1 from another, a straight line between.

    Args:
        at: Position.
        begin: The last with 0.
        end: The first with 1; where it is `begin` too, there the weight is 1.
    """
    if at >= end:
        return 1.0
    return 0.0 if at <= begin else (at - begin) / (end - begin)


def transition_schedule(center: float, period: float) -> Callable[[int], float]:
    """`transition_weight` as a schedule over steps.

    Args:
        center: Step in which both optimizers have the same weight.
        period: The second makes all of a step from half a period after the center; above 0.

    Raises:
        ValueError: If the period is not above 0.
    """
    if not period > 0:
        raise ValueError(f"transition_schedule(period={period!r}) must be above 0: half of it is the way to the end.")
    return partial(transition_weight, center=center, period=period)


def linear_schedule(begin: float, end: float) -> Callable[[int], float]:
    """`linear_weight` as a schedule over steps.

    Args:
        begin: The last step that the first optimizer makes alone.
        end: The first that the second makes alone.

    Raises:
        ValueError: If the end comes first.
    """
    if not begin <= end:
        raise ValueError(f"linear_schedule(begin={begin!r}, end={end!r}) must begin before it ends.")
    return partial(linear_weight, begin=begin, end=end)
