"""What one rank has of the tensors that a checkpoint keeps, each under one name and as boxes of the whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_hybrid.functional.boxes import Box, boxes_of_shard
from lightning_hybrid.functional.splits import Split


@dataclass(frozen=True)
class Piece:
    """A box of a tensor with its numbers.

    Attributes:
        box: Where it lies in the whole.
        data: A tensor of the box's sizes, such as a view of what the rank holds; written in place when loaded.
    """

    box: Box
    data: Tensor


@dataclass(frozen=True)
class Part:
    """What one rank has of one tensor.

    Attributes:
        shape: The whole's.
        dtype: The whole's.
        pieces: Boxes that do not overlap; all ranks' together cover the whole. Ranks that hold the same box have the
            same numbers in it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


Parts = Mapping[str, Part]


def part_of(tensor: Tensor, split: Split | None = None, size: int = 1, rank: int = 0) -> Part:
    """A tensor as this rank holds it: whole, or its slice over the tensor axis, or its shard of either.

    Args:
        tensor: Sharded over the data axis on the first dimension, if it is a DTensor.
        split: How the tensor axis deals the whole out, if it does.
        size: Ranks of the tensor axis.
        rank: This rank on it.
    """
    shape = tuple(tensor.shape) if split is None else split.whole_shape(tensor.shape)
    local = tensor.detach()
    rows = None
    if isinstance(tensor, DTensor):
        local, rows = tensor.to_local().detach(), shard_rows(tensor)
    if not prod(shape):  # it has no elements, but is there
        return Part(shape, tensor.dtype, (Piece(Box.of(shape), local.new_empty(shape)),))
    boxes = boxes_of_shard(shape, split, size, rank, rows)
    return Part(shape, tensor.dtype, tuple(Piece(whole, inner.view(local)) for whole, inner in boxes))


def shard_rows(tensor: DTensor) -> tuple[int, int] | None:
    """The rows [begin, end) of a DTensor that this rank has, cut as `torch.chunk` cuts; None for all.

    Raises:
        ValueError: If it is sharded in another way than `fully_shard` does.
    """
    sharded = [(dim, placement) for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if not sharded:
        return None
    (mesh_dim, placement), *more = sharded
    if more or not placement.is_shard(0):
        raise ValueError(f"A tensor has placements {tensor.placements}; only shards of the first dimension are saved.")
    ranks, length = tensor.device_mesh.size(mesh_dim), tensor.shape[0]
    each = -(-length // ranks)
    begin = min(length, tensor.device_mesh.get_local_rank(mesh_dim) * each)
    return begin, min(length, begin + each)


def all_pieces(parts: Parts) -> Iterator[tuple[str, Part, Piece]]:
    """Every piece with its tensor's name."""
    return ((name, part, piece) for name, part in parts.items() for piece in part.pieces)
