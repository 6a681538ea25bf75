"""When a run has diverged: losses and gradient norms that are not finite, or far above those of the steps before."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import median
from typing import Any

TO_DEVIATION = 1.4826  # of a normal distribution, the standard deviation is so many median absolute deviations
LEAST_DEVIATION = 0.01  # of the median


def not_finite(loss: float, norm: float) -> str:
    """Which of them is NaN or infinite, in words; "" if neither is."""
    named = (("loss", loss), ("gradient norm", norm))
    wrong = [f"{name} is {value}" for name, value in named if not isfinite(value)]
    return " and ".join(wrong)


def robust_score(history: Sequence[float], value: float) -> float:
    """How many robust standard deviations a value is above the median of others; negative below it.

    The deviation is 1.4826 times the median absolute deviation, and at least a hundredth of the median: losses that
    hardly differ, as at the end of training or on repeated batches, would make a spike of any rise. Where more than
    half of the values are equal, as with hinge losses that are mostly 0, the largest deviation takes the place of the
    median one, which is 0; where all are 0 there is no scale, and the score is 0.

    Args:
        history: At least one number, all finite.
        value: Finite.

    Source: Iglewicz and Hoaglin 1993, How to detect and handle outliers, section 3.3.
    """
    middle = median(history)
    distances = [abs(each - middle) for each in history]
    deviation = max(TO_DEVIATION * (median(distances) or max(distances)), LEAST_DEVIATION * abs(middle))
    return (value - middle) / deviation if deviation else 0.0


class SpikeWindow:
    """Losses and gradient norms of the last good steps, and whether the next ones are far above them.

    Args:
        window: Number of steps, at least 2. Judged is from half as many on.
        threshold: Robust standard deviations above the median from which on a value is a spike; above 0.

    Raises:
        ValueError: If one is out of range.
    """

    def __init__(self, window: int = 50, threshold: float = 10.0) -> None:
        if isinstance(window, bool) or not isinstance(window, int) or window < 2:
            raise ValueError(f"window={window!r} must be a whole number of steps of at least 2.")
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 < threshold < float("inf"):
            raise ValueError(f"threshold={threshold!r} must be a finite number above 0.")
        self.threshold = float(threshold)
        self._values: dict[str, deque[float]] = {name: deque(maxlen=window) for name in ("loss", "gradient norm")}

    def judge(self, loss: float, norm: float) -> str:
        """Why a step is bad, in words; "" if it is not."""
        wrong = not_finite(loss, norm)
        if wrong:
            return wrong
        for (name, values), value in zip(self._values.items(), (loss, norm), strict=True):
            score = robust_score(values, value) if 2 * len(values) >= (values.maxlen or 0) else 0.0
            if score >= self.threshold:
                return (
                    f"{name} {value:.6g} is {score:.3g} robust standard deviations above {median(values):.6g}, the "
                    f"median of {len(values)} steps"
                )
        return ""

    def add(self, loss: float, norm: float) -> None:
        """Take a good step in."""
        for values, value in zip(self._values.values(), (loss, norm), strict=True):
            values.append(value)

    def clear(self) -> None:
        """Forget all steps."""
        for values in self._values.values():
            values.clear()

    def state_dict(self) -> dict[str, Any]:
        """Its values."""
        return {name: list(values) for name, values in self._values.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with them."""
        for name, values in self._values.items():
            values.clear()
            values.extend(state_dict[name])
