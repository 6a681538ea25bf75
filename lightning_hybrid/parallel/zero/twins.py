"""Shards and the whole parameters that modules show in their place for a while: both are frozen, or neither."""

from __future__ import annotations

from torch import nn


class Twins:
    """Pairs of a shard and of what `fully_shard` keeps for good as its whole parameter.

    Attributes:
        whole: The whole ones.
    """

    def __init__(self) -> None:
        self.whole: list[nn.Parameter] = []
        self._shards: list[nn.Parameter] = []
        self._trained: list[bool] = []

    def add(self, shard: nn.Parameter, whole: nn.Parameter) -> None:
        """One more pair, of which neither is frozen."""
        self.whole.append(whole)
        self._shards.append(shard)
        self._trained.append(True)

    def whole_of(self, shard: nn.Parameter) -> nn.Parameter | None:
        """What modules show in a shard's place; None for what cannot have a gradient."""
        return next((whole for own, whole in zip(self._shards, self.whole, strict=True) if own is shard), None)

    def leaf(self, parameter: nn.Parameter) -> nn.Parameter:
        """What modules show in a parameter's place, or itself."""
        whole = self.whole_of(parameter)
        return parameter if whole is None else whole

    def agree(self) -> None:
        """Where the user has frozen or thawed one of two, which is what modules have shown, let the other follow."""
        for index, (shard, whole) in enumerate(zip(self._shards, self.whole, strict=True)):
            if shard.requires_grad != whole.requires_grad:  # so that one of them is no longer as it was
                self._trained[index] = not self._trained[index]
                shard.requires_grad_(self._trained[index])
                whole.requires_grad_(self._trained[index])
            self._trained[index] = shard.requires_grad
