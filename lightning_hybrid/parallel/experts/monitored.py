"""What a layer of experts has for those who watch it, whichever package it comes from."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from lightning_hybrid.functional.loads import Layers, Routed, added
from lightning_hybrid.parallel.ledgers.traffic import over_ranks


@runtime_checkable
class RoutingCounter(Protocol):
    """Sums over the training passes of one layer in this process: each pass once, whether it is recomputed or not.

    Attributes:
        num_tokens: T.
        counts: [E], int64: pairs that the router gave to each expert, those dropped included.
        dropped: [E], int64: those of them that were above the capacity.
        entropy: Sum over the tokens of the entropy of their probabilities, in nats.
    """

    num_tokens: int

    @property
    def counts(self) -> Tensor: ...  # noqa: D102 - above

    @property
    def dropped(self) -> Tensor: ...  # noqa: D102

    @property
    def entropy(self) -> float: ...  # noqa: D102

    def reset(self) -> None:
        """Begin anew."""

    def follow(self) -> RoutingCounter:
        """Another one that counts the same passes from now on, and is reset on its own."""

    def leave(self, follower: RoutingCounter) -> None:
        """Let it count no more."""


def counters_of(root: nn.Module) -> dict[str, RoutingCounter]:
    """`statistics` of the layers that have some, by the layer's name."""
    found = {name: getattr(module, "statistics", None) for name, module in root.named_modules()}
    return {name: counter for name, counter in found.items() if isinstance(counter, RoutingCounter)}


def read(counters: dict[str, RoutingCounter]) -> Layers:
    """What the layers of this rank have routed since the last time, which waits for the device."""
    layers: Layers = {}
    for name, counter in counters.items():
        counts, dropped = counter.counts.tolist(), counter.dropped.tolist()
        layers[name] = Routed(tuple(counts), tuple(dropped), counter.num_tokens, counter.entropy)
        counter.reset()
    return layers


def summed_over_ranks(layers: Layers) -> Layers:
    """Of all ranks, equal on each; all of them call it together.

    A layer is on one stage of a pipeline, and each replica counts its own tokens. Ranks of the tensor axis count the
    same ones, which leaves all shares and means as they are.
    """
    total: Layers = {}
    for each in over_ranks(layers):
        total = added(total, each)
    return total
