"""Sums and maxima over whole tensors of which a process has a part, in one exchange for all of them.

A parameter may be dealt out several times: over the mesh of a DTensor (`fully_shard`, ZeRO), and before that over axes
that tensors say nothing of, such as the tensor axis of a strategy. Optimizers look at neither: they hand in what the
local part gives, and the dimensions that it covers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

Operation = Literal["sum", "max"]


class Axis(Protocol):
    """Ranks among which tensors are dealt out; equal axes are of the same ranks."""

    def reduce(self, values: Tensor, operation: Operation) -> Tensor:
        """Combine a vector over all ranks, which call it together; each gets the result, where its vector is."""


class Dealing(NamedTuple):
    """How one dimension of a parameter is dealt out.

    Attributes:
        dim: The dimension, counted from 0.
        axis: The ranks.
        length: Length of the dimension before it is dealt out.
    """

    dim: int
    axis: Axis
    length: int


@dataclass(frozen=True)
class MeshAxis:
    """One dimension of the mesh of a DTensor."""

    mesh: DeviceMesh
    dim: int

    def reduce(self, values: Tensor, operation: Operation) -> Tensor:
        """As `Axis` says."""
        whole: list[Placement] = [Replicate()] * self.mesh.ndim
        parts = [*whole[: self.dim], Partial(operation), *whole[self.dim + 1 :]]
        values_there = values.to(self.mesh.device_type)  # shards may wait in host memory
        reduced = DTensor.from_local(values_there, self.mesh, parts, run_check=False).redistribute(placements=whole)
        return reduced.to_local().to(values.device)


class Contribution(NamedTuple):
    """What a process gives to a sum or a maximum.

    Attributes:
        value: Over the local part of the parameter.
        dealings: Of the parameter.
        dims: The dimensions of the parameter over which the value has been taken; None for all.
    """

    value: Tensor
    dealings: Sequence[Dealing]
    dims: Collection[int] | None = None

    @property
    def axes(self) -> list[Axis]:
        """Ranks that have the rest of it."""
        return [dealing.axis for dealing in self.dealings if self.dims is None or dealing.dim in self.dims]


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that is in this process's memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def mesh_dealings(tensor: Tensor) -> list[Dealing]:
    """Those that a tensor itself tells of.

    Raises:
        ValueError: If a DTensor holds sums that have not been made.
    """
    if not isinstance(tensor, DTensor):
        return []
    return [
        Dealing(sharded_dim(placement), MeshAxis(tensor.device_mesh, dim), tensor.shape[sharded_dim(placement)])
        for dim, placement in enumerate(tensor.placements)
        if not placement.is_replicate()
    ]


def sharded_dim(placement: Placement) -> int:
    """The dimension that a placement deals out.

    Raises:
        ValueError: If it deals out none.
    """
    dim = getattr(placement, "dim", None)
    if not isinstance(dim, int):
        raise ValueError(f"A parameter has the placement {placement}; an optimizer needs Shard or Replicate.")
    return dim


def reduce(contributions: Sequence[Contribution], operation: Operation) -> list[Tensor]:
    """What all processes have given together, one collective for each axis; its ranks come with the same parameters.

    Sums are made in float32 at least. A maximum with a NaN on another rank is infinite: gloo's maximum loses it.

    Args:
        contributions: Of this process.
        operation: "sum" or "max".

    Returns:
        Tensors of the values' shapes and types.
    """
    values = [contribution.value for contribution in contributions]
    for axis in dict.fromkeys(axis for each in contributions if each.dealings for axis in each.axes):
        concerned = [i for i, contribution in enumerate(contributions) if axis in contribution.axes]
        dtype, home = torch.float32, values[concerned[0]].device
        for i in concerned:
            dtype = torch.promote_types(dtype, values[i].dtype)
        flat = torch.cat([values[i].reshape(-1).to(home, dtype) for i in concerned])
        if operation == "max":
            flat = flat.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        parts = axis.reduce(flat, operation).split([values[i].numel() for i in concerned])
        for i, part in zip(concerned, parts, strict=True):
            values[i] = part.view(values[i].shape).to(values[i].device, values[i].dtype)
    return values
