"""Running Kronecker factors of a rank's layers, and their inverses, of which each is made by one rank of a group."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.functional.kfac import (
    Inverse,
    averaging,
    deal_out,
    decomposed,
    inverted,
    precondition,
    split_damping,
)
from lightning_hybrid.parallel.curvature.layers import Layer
from lightning_hybrid.parallel.curvature.sums import Sums, shape_of_inputs

RAISE = 10.0  # what damping is multiplied by for a factor that is not positive definite with it


@dataclass
class Factors:
    """Of one layer.

    Attributes:
        first: A.
        second: G.
        count: Means that have been taken in.
        damping: Of the inverses.
        inverses: Of A and of G; None before the first.
    """

    first: Tensor
    second: Tensor
    count: int = 0
    damping: float = 0.0
    inverses: tuple[Inverse, Inverse] | None = None


class RunningFactors:
    """Factors and inverses of all layers of a rank.

    Args:
        layers: By name.
        method: "inverse" inverts each damped factor; "eigen" their damped product, by eigenvectors.
        dtype: At least float32.
        device: Where they are.
        group: Ranks that have the same layers, which call each method together; None for one alone.

    Attributes:
        owners: For each layer the rank in the group that inverts its factors.
    """

    def __init__(
        self,
        layers: Mapping[str, Layer],
        method: Literal["eigen", "inverse"],
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.layers, self._method, self._group = layers, method, group
        self._dtype, self._device = dtype, device
        self.of = {name: self._new(layer) for name, layer in layers.items()}
        costs = [layer.rows**3 + (0 if layer.is_diagonal else layer.columns**3) for layer in layers.values()]
        size = 1 if group is None else dist.get_world_size(group)
        self.owners = dict(zip(layers, deal_out(costs, size), strict=True))

    def take_in(self, sums: Mapping[str, Sums], factor: float, decay: float) -> bool:
        """Take in the means of a window; none of them if any is not finite.

        Args:
            sums: Summed over the group.
            factor: What sums of slopes are multiplied by.
            decay: Largest weight of the past.

        Returns:
            Whether all were finite. A layer without inputs is left as it is.
        """
        numbers = torch.stack([each.number for each in sums.values()]).tolist() if sums else []
        for each in sums.values():
            each.slopes.mul_(factor)
        largest = [torch.stack([each.inputs.abs().max(), each.slopes.abs().max()]) for each in sums.values()]
        if largest and not bool(torch.stack(largest).isfinite().all()):
            return False
        for (name, each), number in zip(sums.items(), numbers, strict=True):
            if number:
                own = self.of[name]
                own.count += 1
                past = averaging(own.count, decay)
                own.first.lerp_(each.inputs / number, 1.0 - past)
                own.second.lerp_(each.slopes, 1.0 - past)
        return True

    def invert(self, damping: float) -> None:
        """Make the inverses of all layers that have factors, each on its owner, and give them to the group.

        Where a factor is not positive definite, the layer's damping is raised once, with a warning.

        Raises:
            RuntimeError: If that does not help, on all ranks of the group.
        """
        ready = [name for name, own in self.of.items() if own.count]
        used = torch.zeros(len(ready), dtype=torch.float64, device=self._device)
        rank = 0 if self._group is None else dist.get_rank(self._group)
        for index, name in enumerate(ready):
            own = self.of[name]
            if self.owners[name] != rank:
                own.inverses = self._room(self.layers[name])
                continue
            own.inverses, used[index] = self._inverses(own, damping)
        if self._group is not None:
            dist.all_reduce(used, group=self._group)
        for name, value in zip(ready, used.tolist(), strict=True):
            self._heed(name, damping, value)
        self._share(ready)

    def natural(self, name: str, gradient: Tensor) -> Tensor | None:
        """The natural gradient of a layer, of the gradient's type; None without inverses."""
        own = self.of[name]
        if own.inverses is None:
            return None
        damping = own.damping if self._method == "eigen" else None
        return precondition(gradient.to(self._dtype), *own.inverses, damping).to(gradient.dtype)

    def rank_of(self, name: str) -> int:
        """The rank of the world that inverts a layer's factors."""
        owner = self.owners[name]
        return owner if self._group is None else dist.get_global_rank(self._group, owner)

    def num_bytes(self, name: str) -> int:
        """What a layer's factors and inverses take."""
        own = self.of[name]
        inverses = self._room(self.layers[name], torch.device("meta"))
        return sum(t.nbytes for t in (own.first, own.second, *inverses[0], *inverses[1]))

    def state(self, name: str) -> dict[str, Any]:
        """What is saved of a layer."""
        own = self.of[name]
        inverses = None if own.inverses is None else [list(pair) for pair in own.inverses]
        return {
            "first": own.first,
            "second": own.second,
            "count": own.count,
            "damping": own.damping,
            "inverses": inverses,
        }

    def restore(self, name: str, state: Mapping[str, Any]) -> None:
        """Take what `state` gave.

        Raises:
            ValueError: If it is of a layer of other sizes, or of another method.
        """
        own = self.of[name]
        shapes = [tuple(state[key].shape) for key in ("first", "second")]
        if shapes != [tuple(own.first.shape), tuple(own.second.shape)]:
            raise ValueError(
                f"The checkpoint has Kronecker factors of shapes {shapes} for {name}, which has "
                f"{[tuple(own.first.shape), tuple(own.second.shape)]}. Load the weights alone (load_from_checkpoint)."
            )
        own.first.copy_(state["first"])
        own.second.copy_(state["second"])
        own.count, own.damping, own.inverses = state["count"], state["damping"], None
        if state["inverses"] is not None:
            room = self._room(self.layers[name])
            for pair, saved in zip(room, state["inverses"], strict=True):
                for tensor, value in zip(pair, saved, strict=True):
                    if tensor.shape != value.shape:
                        raise ValueError(
                            f"The checkpoint has inverses of {name} by another method than {self._method!r}. Give "
                            "KFACPreconditioner the method that it was saved with."
                        )
                    tensor.copy_(value)
            own.inverses = room

    def _inverses(self, own: Factors, damping: float) -> tuple[tuple[Inverse, Inverse] | None, float]:
        """The inverses, and the damping that they have: raised where needed, and -1 where even that fails."""
        make = inverted if self._method == "inverse" else decomposed
        for used in (damping, RAISE * damping):
            shifts = split_damping(own.first, own.second, used)
            pair = make(own.first, shifts[0]), make(own.second, shifts[1])
            if pair[0] is not None and pair[1] is not None:
                first, second = (Inverse(*(t.contiguous() for t in each)) for each in (pair[0], pair[1]))
                return (first, second), used  # as others get them, and checkpoints give them back
        return None, -1.0

    def _heed(self, name: str, asked: float, used: float) -> None:
        if used < 0:
            raise RuntimeError(
                f"The Kronecker factors of {name} are not positive definite with damping={asked:g}, and not with "
                f"{RAISE * asked:g} either. Give KFACPreconditioner more damping, or leave {name} out of modules."
            )
        if used != asked and (self._group is None or dist.get_rank(self._group) == 0):
            warnings.warn(
                f"The Kronecker factors of {name} are not positive definite with damping={asked:g}: {used:g} is used "
                "until they are inverted again.",
                stacklevel=2,
            )
        self.of[name].damping = used

    def _share(self, names: list[str]) -> None:
        if self._group is None:
            return
        works = []
        for name in names:
            source = dist.get_global_rank(self._group, self.owners[name])
            tensors = [t for inverse in self.of[name].inverses or () for t in inverse if t.numel()]
            works += [dist.broadcast(t, source, group=self._group, async_op=True) for t in tensors]
        for work in works:
            work.wait()

    def _new(self, layer: Layer) -> Factors:
        first = torch.zeros(shape_of_inputs(layer), dtype=self._dtype, device=self._device)
        return Factors(first, first.new_zeros(layer.rows, layer.rows))

    def _room(self, layer: Layer, device: torch.device | None = None) -> tuple[Inverse, Inverse]:
        """Empty inverses of a layer."""
        pair = []
        for shape in (shape_of_inputs(layer), (layer.rows, layer.rows)):
            is_matrix = len(shape) == 2
            by_vectors = self._method == "eigen"
            sizes = (shape[:1] if by_vectors else shape), (shape if by_vectors and is_matrix else (0,))
            pair.append(Inverse(*(torch.empty(s, dtype=self._dtype, device=device or self._device) for s in sizes)))
        return pair[0], pair[1]
