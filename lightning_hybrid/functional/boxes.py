"""Rectangular parts of a tensor: where the pieces lie in the whole that ranks hold, files keep and loading asks for.

`torch.distributed.checkpoint` describes stored chunks in the same way, but knows no fused weight of which a rank holds
slices of each third.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from torch import Tensor

from lightning_hybrid.functional.splits import Split, bounds


@dataclass(frozen=True, order=True)
class Box:
    """A part of a tensor.

    Attributes:
        offsets: Where it begins in each dimension.
        sizes: How long it is in each dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements; 1 without dimensions."""
        return prod(self.sizes)

    def meet(self, other: Box) -> Box | None:
        """What two boxes have in common, or None if that is nothing."""
        starts = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        ends = (min(a, b) for a, b in zip(self.ends, other.ends, strict=True))
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    @property
    def ends(self) -> tuple[int, ...]:
        """Where it ends in each dimension."""
        return tuple(start + size for start, size in zip(self.offsets, self.sizes, strict=True))

    def within(self, outer: Box) -> Box:
        """The same part, as seen from the beginning of a box that it is in."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.sizes)

    def view(self, tensor: Tensor) -> Tensor:
        """The part of a tensor, as a view."""
        for dim, (start, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            tensor = tensor.narrow(dim, start, size)
        return tensor

    def runs(self, shape: Sequence[int]) -> Iterator[tuple[int, Box]]:
        """The parts that lie in one piece in the memory of the whole, each after the number of elements before it."""
        if not self.numel:
            return
        last = max((dim for dim, size in enumerate(self.sizes) if size != shape[dim]), default=0)
        outer = zip(self.offsets[:last], self.sizes[:last], strict=True)
        for index in product(*(range(start, start + size) for start, size in outer)):
            offsets = (*index, *self.offsets[last:])
            start = 0
            for offset, size in zip(offsets, shape, strict=True):
                start = start * size + offset
            yield start, Box(offsets, (*(1 for _ in index), *self.sizes[last:]))

    def cut(self, most: int) -> Iterator[Box]:
        """Consecutive parts of at most `most` elements each."""
        if self.numel <= max(1, most):
            yield self
            return
        dim = next(dim for dim, size in enumerate(self.sizes) if size > 1)
        size, offset = self.sizes[dim], self.offsets[dim]
        step = max(1, most * size // self.numel)
        for start in range(0, size, step):
            offsets = (*self.offsets[:dim], offset + start, *self.offsets[dim + 1 :])
            yield from Box(offsets, (*self.sizes[:dim], min(step, size - start), *self.sizes[dim + 1 :])).cut(most)


def boxes_of_shard(
    shape: Sequence[int], split: Split | None, size: int, rank: int, rows: tuple[int, int] | None
) -> list[tuple[Box, Box]]:
    """The parts that one rank holds of a tensor, each as (box in the whole, box in what the rank holds).

    Args:
        shape: The whole.
        split: How the tensor axis deals it out, if it does.
        size: Ranks of the tensor axis.
        rank: This rank on it.
        rows: Of the rank's slice over the tensor axis, the part [begin, end) of the first dimension that is its shard;
            None keeps all.

    Returns:
        Boxes with elements only.
    """
    parts = [(Box.of(shape), Box.of(shape))] if split is None else list(_slices(shape, split, size, rank))
    if rows is None:
        return [pair for pair in parts if pair[0].numel]
    begin, end = rows
    found = []
    for whole, local in parts:
        kept = local.meet(Box((begin, *local.offsets[1:]), (max(0, end - begin), *local.sizes[1:])))
        if kept is not None:
            shift = kept.offsets[0] - local.offsets[0]
            moved = Box((whole.offsets[0] + shift, *whole.offsets[1:]), kept.sizes)
            found.append((moved, Box((kept.offsets[0] - begin, *kept.offsets[1:]), kept.sizes)))
    return found


def _slices(shape: Sequence[int], split: Split, size: int, rank: int) -> list[tuple[Box, Box]]:
    local, found = 0, []
    for begin, end in bounds(split, size, rank):
        sizes = (*shape[: split.dim], end - begin, *shape[split.dim + 1 :])
        start = [0] * len(shape)
        place = [0] * len(shape)
        start[split.dim], place[split.dim] = begin, local
        found.append((Box(tuple(start), sizes), Box(tuple(place), sizes)))
        local += end - begin
    return found
