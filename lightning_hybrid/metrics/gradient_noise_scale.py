"""The gradient noise scale, and with it the critical batch size, averaged over steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_hybrid.functional.noise_scale import GradientSums, Moments, estimate, noise_scale

STATES = ("noise", "signal", "weight", "count")


class GradientNoiseScale(Metric):
    """tr(Sigma) / abs(G)^2: how many samples it takes until a batch's gradient is as much signal as noise.

    It is the critical batch size: smaller batches train in proportion to their size, much larger ones waste samples. At
    it, both steps and samples are twice the least, see `functional.noise_scale.batch_costs`. It is in samples, or in
    units of `loss_weight` where `training_step` returns one.

    `GradientNoiseScaleMonitor` feeds it while a Trainer trains. Numerator and denominator are averaged over the steps,
    the newest of which weighs most, before they are divided: each is unbiased, and the ratio of one step is not.

    Args:
        decay: What the weight of all earlier steps is multiplied by at each step, 0 to 1: steps count for about
            1 / (1 - decay) further ones; 1 takes the mean of all.

    Attributes:
        moments: Averages of the variance of one sample's gradient and of the squared norm of the mean gradient.
        steps: Number of steps seen.

    Raises:
        ValueError: If `decay` is out of range.

    Source: McCandlish et al. 2018, arXiv:1812.06162, section 2.2 and appendix A.1.
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = True  # the value of one step alone comes from states of its own

    noise: Tensor
    signal: Tensor
    weight: Tensor
    count: Tensor

    def __init__(self, decay: float = 0.99) -> None:
        super().__init__(sync_on_compute=False)  # all ranks are given the same
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay <= 1:
            raise ValueError(f"decay={decay!r} must be a number from 0 to 1.")
        self.decay = float(decay)
        for name in STATES:
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="mean")
        # a MetricCollection takes metrics whose states are equal after one step for the same
        self.add_state("memory", torch.tensor(self.decay, dtype=torch.float64), dist_reduce_fx="mean")

    @override
    def update(self, sums: GradientSums, square: float) -> None:
        """Take one step in.

        Args:
            sums: Of its small gradients, as `GradientSums.of` makes them.
            square: Squared norm of their weighted sum.

        Raises:
            ValueError: If there are fewer than two small gradients.
        """
        new = estimate(sums, square)
        self.noise = self.decay * self.noise + new.noise
        self.signal = self.decay * self.signal + new.signal
        self.weight = self.decay * self.weight + 1
        self.count = self.count + 1

    @override
    def compute(self) -> Tensor:
        """The scale, float64; infinite where noise hides the signal, NaN without steps or gradients."""
        return torch.tensor(noise_scale(self.moments), dtype=torch.float64, device=self.noise.device)

    @property
    def moments(self) -> Moments:
        """Averages so far; NaN before the first step."""
        return Moments(float(self.noise / self.weight), float(self.signal / self.weight))

    @property
    def steps(self) -> int:
        """Steps taken in since the last reset."""
        return int(self.count)

    def saved(self) -> dict[str, Any]:
        """What a checkpoint needs to go on from here."""
        return {name: float(getattr(self, name)) for name in STATES}

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on from what `saved` gave."""
        for name in STATES:
            setattr(self, name, torch.full_like(getattr(self, name), saved[name]))
