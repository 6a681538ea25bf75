"""How evenly a router uses its experts: sums that add up over passes and replicas, and what is told from them."""

from __future__ import annotations

from dataclasses import dataclass

MOST_WINDOWS = 256  # a picture has not many more columns


@dataclass(frozen=True)
class Routed:
    """Sums over the tokens that one layer has routed.

    Attributes:
        counts: Of each of the E experts, the pairs of a token and it, before dropping.
        dropped: Those of them that were above the capacity.
        num_tokens: T.
        entropy: Sum over the tokens of the entropy of their probabilities, in nats.
    """

    counts: tuple[int, ...]
    dropped: tuple[int, ...]
    num_tokens: int
    entropy: float

    def __add__(self, other: Routed) -> Routed:
        return Routed(
            tuple(map(sum, zip(self.counts, other.counts, strict=True))),
            tuple(map(sum, zip(self.dropped, other.dropped, strict=True))),
            self.num_tokens + other.num_tokens,
            self.entropy + other.entropy,
        )

    @property
    def num_pairs(self) -> int:
        """How many pairs."""
        return sum(self.counts)

    @property
    def load(self) -> list[float]:
        """Each expert's share of the pairs; zeros if there are none."""
        return [count / max(self.num_pairs, 1) for count in self.counts]

    @property
    def imbalance(self) -> float:
        """The largest load over that of even routing: 1 if all are equal, E if one expert has everything."""
        return max(self.load) * len(self.counts)

    @property
    def dropped_share(self) -> float:
        """Share of the pairs that were above the capacity; with one expert a token, of the tokens."""
        return sum(self.dropped) / max(self.num_pairs, 1)

    @property
    def mean_entropy(self) -> float:
        """Mean over the tokens, in nats: ln E if a router prefers no expert, 0 if it is certain."""
        return self.entropy / max(self.num_tokens, 1)


Layers = dict[str, Routed]


def added(first: Layers, second: Layers) -> Layers:
    """Sums of two, each layer's own."""
    total = dict(first)
    for name, routed in second.items():
        total[name] = total[name] + routed if name in total else routed
    return total


class LoadHistory:
    """Windows of steps, one after the other. A long run has wider windows instead of more of them.

    Attributes:
        windows: The last step of each, and what was routed in it.
    """

    def __init__(self) -> None:
        self.windows: list[tuple[int, Layers]] = []
        self._width, self._filled = 1, 0

    def add(self, step: int, layers: Layers) -> None:
        """Add a window.

        Args:
            step: Its last step.
            layers: What was routed in it.
        """
        if 0 < self._filled < self._width:
            self.windows[-1] = step, added(self.windows[-1][1], layers)
            self._filled += 1
            return
        if len(self.windows) == MOST_WINDOWS:
            pairs = zip(self.windows[::2], self.windows[1::2], strict=True)
            self.windows = [(last, added(one, two)) for (_, one), (last, two) in pairs]
            self._width *= 2
        self.windows.append((step, layers))
        self._filled = 1

    def forget(self, step: int) -> None:
        """Drop windows that end after a step, to which a run has gone back."""
        kept = [window for window in self.windows if window[0] <= step]
        if len(kept) < len(self.windows):
            self.windows, self._filled = kept, self._width  # nothing is added to the last one

    def total(self) -> Layers:
        """Of all windows."""
        total: Layers = {}
        for _, layers in self.windows:
            total = added(total, layers)
        return total
