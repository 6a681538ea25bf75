"""What a layer of experts has done in training, added up for whoever logs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class RoutingStatistics:
    """Sums over the training passes of one layer since `reset()`, of this process alone.

    They stay on the layer's device until they are read, which waits for it. They are no part of a state: copies of the
    module take them along, checkpoints do not. As a dataclass they go back with a run that does, see `Frozen`.

    Args:
        num_experts: E.

    Attributes:
        num_passes: How many calls of the layer.
        num_tokens: In all of them.
    """

    num_experts: int

    def __post_init__(self) -> None:
        self._followers: list[RoutingStatistics] = []
        self.reset()

    def follow(self) -> RoutingStatistics:
        """Others that count the same passes from now on, and are reset on their own."""
        self._followers.append(RoutingStatistics(self.num_experts))
        return self._followers[-1]

    def leave(self, follower: object) -> None:
        """Let those count no more."""
        self._followers = [other for other in self._followers if other is not follower]

    def reset(self) -> None:
        """Begin anew."""
        self.num_passes = self.num_tokens = 0
        self._counts = self._kept = torch.zeros(self.num_experts, dtype=torch.int64, device="cpu")
        self._entropy: Tensor | float = 0.0
        self._losses: dict[str, Tensor] = {}

    def add(self, counts: Tensor, kept: Tensor, probabilities: Tensor, losses: Mapping[str, Tensor]) -> None:
        """Count a pass.

        Args:
            counts: [E], pairs of each expert before dropping.
            kept: [E], and after.
            probabilities: [T, E], of the router.
            losses: Scalars by name, times their coefficients.
        """
        with torch.no_grad():
            entropy = torch.special.entr(probabilities.detach()).sum()
            for each in (self, *self._followers):
                each._add(counts, kept, len(probabilities), entropy, losses)

    def _add(
        self, counts: Tensor, kept: Tensor, num_tokens: int, entropy: Tensor, losses: Mapping[str, Tensor]
    ) -> None:
        self.num_passes += 1
        self.num_tokens += num_tokens
        self._counts = self._counts.to(counts.device) + counts
        self._kept = self._kept.to(kept.device) + kept
        self._entropy = _added(self._entropy, entropy)
        for name, loss in losses.items():
            self._losses[name] = _added(self._losses.get(name, 0.0), loss.detach())

    @property
    def counts(self) -> Tensor:
        """[E], int64: pairs that the router gave to each expert, those dropped included."""
        return self._counts.clone()

    @property
    def dropped(self) -> Tensor:
        """[E], int64: those of them that were above the capacity."""
        return self._counts - self._kept

    @property
    def entropy(self) -> float:
        """Sum over the tokens of the entropy of their probabilities, in nats."""
        return float(self._entropy)

    @property
    def losses(self) -> dict[str, float]:
        """Sums over the passes of each loss that the layer has added, times its coefficient, by name."""
        return {name: float(loss) for name, loss in self._losses.items()}


def _added(total: Tensor | float, value: Tensor) -> Tensor:
    return value + (total.to(value.device) if isinstance(total, Tensor) else total)
