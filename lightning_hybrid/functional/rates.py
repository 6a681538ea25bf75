"""Factors of learning rates: by the batch size, and while training warms up."""

from __future__ import annotations

import math
from collections.abc import Callable


def linear_scale(ratio: float) -> float:
    """Factor of a rate for a batch `ratio` times as large: the ratio itself.

    Source: Goyal et al. 2017, arXiv:1706.02677, section 2.1, linear scaling rule.
    """
    return ratio


def sqrt_scale(ratio: float) -> float:
    """Factor of a rate for a batch `ratio` times as large: its square root.

    Source: Hoffer et al. 2017, arXiv:1705.08741, section 4, for SGD; Malladi et al. 2022, arXiv:2205.10287, for RMSprop
        and Adam, whose rule changes betas and eps too.
    """
    return math.sqrt(ratio)


def warmup_progress(done: float, total: float) -> float:
    """How far a warm-up is, from 0 to exactly 1, which it is from `total` on; where `total` is 0, at once."""
    return done / total if done < total else 1.0


def warmup_value(start: float, end: float, progress: float) -> float:
    """A straight line from `start` to `end`, both exact: ``start + (end - start) progress``.

    With the factors of `torch.optim.lr_scheduler.LinearLR` in its closed form, for `start_factor`, 1.0 as end, and
    ``progress = step / total_iters``.

    Source: Goyal et al. 2017, arXiv:1706.02677, section 2.2, gradual warmup.
    """
    return start + (end - start) * progress if progress < 1 else end


def steps_of_epochs(epochs: float, num_batches: int, accumulate: Callable[[int], int]) -> int:
    """Steps of the optimizer in the first epochs, of which the last window of each may be shorter.

    Args:
        epochs: How many, perhaps with a fraction, which is rounded to steps.
        num_batches: Batches of an epoch.
        accumulate: Batches of a step, by the epoch, from 0.

    Returns:
        At least 1.
    """
    whole = int(epochs)
    steps = [math.ceil(num_batches / accumulate(epoch)) for epoch in range(whole + 1)]
    return max(1, sum(steps[:-1]) + round((epochs - whole) * steps[-1]))
