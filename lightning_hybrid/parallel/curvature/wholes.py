"""Gradients of whole parameters out of what ranks hold of them, and back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.functional.boxes import Box
from lightning_hybrid.parallel.checkpoint.parts import Part


class WholeGradients:
    """Puts gradients together over a group, layer by layer, where they are dealt out.

    Args:
        group: Ranks that have the same parameters, or shards of them, and call each method together; None for one.
        device: Where wholes are made.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device
        self._dealt: dict[tuple[str, ...], set[str]] = {}
        self._counted: dict[str, set[Box]] = {}

    def plan(self, parts: Mapping[str, Part], names: Iterable[str]) -> None:
        """Learn who has what of the gradients of some parameters; the ranks call it together, with the same names."""
        key = tuple(name for name in names if name in parts)
        if key not in self._dealt:
            self._dealt[key] = self._exchange({name: parts[name] for name in key})
        self.dealt: Collection[str] = self._dealt[key]

    def whole(self, name: str, part: Part) -> Tensor:
        """A whole gradient; what this rank holds itself where that is all of it."""
        if name not in self.dealt:
            (piece,) = part.pieces
            return piece.data.to(self._device)
        found = torch.zeros(part.shape, dtype=part.dtype, device=self._device)
        for piece in part.pieces:
            if piece.box in self._counted[name]:
                piece.box.view(found).copy_(piece.data)
        dist.all_reduce(found, group=self._group)  # each element has one addend that is not zero
        return found

    @staticmethod
    def put_back(part: Part, whole: Tensor) -> None:
        """Give each piece its numbers of a whole gradient."""
        for piece in part.pieces:
            piece.data.copy_(piece.box.view(whole))

    def _exchange(self, parts: Mapping[str, Part]) -> set[str]:
        """Parameters that are dealt out; of boxes that several ranks hold, the first of them counts."""
        if self._group is None:
            return set()
        own = {name: [piece.box for piece in part.pieces] for name, part in parts.items()}
        everyone: list[dict[str, list[Box]]] = [{} for _ in range(dist.get_world_size(self._group))]
        dist.all_gather_object(everyone, own, group=self._group)
        dealt = set()
        for name, part in parts.items():
            if any(other[name] != [Box.of(part.shape)] for other in everyone):
                dealt.add(name)
                before = {box for other in everyone[: dist.get_rank(self._group)] for box in other[name]}
                self._counted[name] = set(own[name]) - before
        return dealt
