"""Where the slices of a tensor lie that the ranks of the tensor axis hold together, and where a view moves them.

DTensor's placements were considered: `Shard` knows one slice a rank, not the three of a fused query, key and value
weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor


def share(length: int, size: int, rank: int) -> int:
    """Elements that one of `size` ranks gets: as equal as can be, the first ranks one more."""
    return length // size + (rank < length % size)


@dataclass(frozen=True)
class Split:
    """One dimension of a tensor, dealt out to the ranks.

    Attributes:
        dim: The dimension, counted from 0.
        sections: Lengths of consecutive parts of it, each dealt out on its own; a rank holds its slices of all of them
            one after the other. (3 * h,) gives each rank one slice, (h, h, h) one of each third.
    """

    dim: int
    sections: tuple[int, ...]

    @property
    def length(self) -> int:
        """Length of the whole dimension."""
        return sum(self.sections)

    def shares(self, size: int, rank: int) -> list[int]:
        """Elements of each section that a rank holds."""
        return [share(section, size, rank) for section in self.sections]

    def is_even(self, size: int) -> bool:
        """Whether all ranks hold equally much."""
        return all(section % size == 0 for section in self.sections)

    def local_shape(self, shape: Sequence[int], size: int, rank: int) -> tuple[int, ...]:
        """Shape of a rank's part of a whole tensor."""
        return (*shape[: self.dim], sum(self.shares(size, rank)), *shape[self.dim + 1 :])

    def whole_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """Shape of the whole of which `local` is a part."""
        return (*local[: self.dim], self.length, *local[self.dim + 1 :])

    def take(self, whole: Tensor, size: int, rank: int) -> Tensor:
        """A rank's part of a whole tensor: a view if there is one section."""
        parts = whole.split(list(self.sections), self.dim)
        mine = [
            part.narrow(self.dim, _start(part.shape[self.dim], size, rank), share(part.shape[self.dim], size, rank))
            for part in parts
        ]
        return mine[0] if len(mine) == 1 else torch.cat(mine, self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor, of the parts of all ranks in order."""
        size = len(parts)
        if len(self.sections) == 1:
            return torch.cat(list(parts), self.dim)
        pieces = [part.split(self.shares(size, rank), self.dim) for rank, part in enumerate(parts)]
        return torch.cat([pieces[rank][i] for i in range(len(self.sections)) for rank in range(size)], self.dim)

    def moved(self, dim: int) -> Split:
        """The same on another dimension."""
        return Split(dim, self.sections)


def _start(length: int, size: int, rank: int) -> int:
    return sum(share(length, size, other) for other in range(rank))


def resolve(shape: Sequence[int], numel: int) -> tuple[int, ...]:
    """A shape with its -1 replaced."""
    known = prod(n for n in shape if n != -1)
    return tuple((numel // known if known else 0) if n == -1 else n for n in shape)


def view(split: Split, shape: Sequence[int], new: Sequence[int], size: int) -> Split | None:
    """The split of a tensor that is viewed with another shape, or None if no dimension of that is dealt out.

    In memory order a whole tensor with k equal sections is (p, m): p parts before, among which are the sections, of m
    elements each, which the ranks have equal or consecutive slices of. The new shape has such a split at the dimension
    that reaches beyond p.

    Args:
        split: Before.
        shape: The whole tensor's shape before.
        new: The whole tensor's shape afterwards, without -1.
        size: Number of ranks.
    """
    section = split.sections[0]
    if any(other != section for other in split.sections) or prod(new) != prod(shape) or not prod(new):
        return None
    outer = prod(shape[: split.dim]) * len(split.sections)
    inner = prod(shape[split.dim + 1 :])
    before = [1, *accumulate(new, lambda a, b: a * b)]
    dim = next((i for i in range(len(new)) if before[i + 1] > outer), None)
    if dim is None or outer % before[dim] or new[dim] % (outer // before[dim]):
        return None
    count = outer // before[dim]
    units, unit = new[dim] // count, prod(new[dim + 1 :])
    if any(share(units, size, rank) * unit != share(section, size, rank) * inner for rank in range(size)):
        return None
    return Split(dim, (units,) * count)


def pieces(split: Split, lengths: Sequence[int]) -> list[Split] | None:
    """Splits of the parts into which the whole dimension is cut, or None if a cut goes through a section."""
    sections, found = list(split.sections), []
    for length in lengths:
        mine: list[int] = []
        while sum(mine) < length and sections:
            mine.append(sections.pop(0))
        if sum(mine) != length or not mine:
            return None
        found.append(Split(split.dim, tuple(mine)))
    return found if not sections else None


def bounds(split: Split, size: int, rank: int) -> Iterator[tuple[int, int]]:
    """Begin and end, in the whole dimension, of each slice that a rank holds."""
    start = 0
    for section in split.sections:
        begin = start + _start(section, size, rank)
        yield begin, begin + share(section, size, rank)
        start += section
