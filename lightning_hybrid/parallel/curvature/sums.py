"""Sums of outer products of a window's inputs and slopes, layer by layer, as its backward passes go by.

A call's inputs are taken in when its backward pass comes, with its slopes. So a forward pass that no backward pass
follows, as one that is only repeated for activation recomputation, counts nothing, and each micro-batch counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.parallel.curvature.layers import Layer


class Sums(NamedTuple):
    """Of one layer.

    Attributes:
        inputs: Outer products of its inputs, of A's shape.
        slopes: Outer products of its slopes, of G's shape.
        number: How many inputs, a float64 scalar.
    """

    inputs: Tensor
    slopes: Tensor
    number: Tensor


class WindowSums:
    """Hooks on layers, which take sums between `begin` and `end`.

    Args:
        layers: By name.
        modules: The modules that they are, by the same names.
        dtype: Of the sums, at least float32.
        device: Where they are.

    Attributes:
        is_open: There are sums of a window.
        takes: Calls and their backward passes add to them.
        weight: What slopes are multiplied by.
        is_own: Whether the backward pass under way is one that counts, as one of a step's `torch.autograd.grad` is not.
    """

    def __init__(
        self, layers: Mapping[str, Layer], modules: Mapping[str, nn.Module], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers, self.is_open, self.takes, self.weight = layers, False, False, 1.0
        self.is_own: Callable[[], bool] = _always
        self._dtype, self._device = dtype, device
        self._flat, self._numbers = torch.empty(0), torch.empty(0)
        self._sums: dict[str, Sums] = {}
        self._handles = [
            modules[name].register_forward_hook(partial(self._called, name), with_kwargs=True) for name in layers
        ]

    def begin(self, *, takes: bool = True) -> None:
        """Begin sums at zero."""
        sizes = [sum(shape.numel() for shape in pair) for pair in self._shapes()]
        self._flat = torch.zeros(sum(sizes), dtype=self._dtype, device=self._device)
        self._numbers = torch.zeros(len(sizes), dtype=torch.float64, device=self._device)
        self._sums = self._views()
        self.is_open, self.takes, self.weight = True, takes, 1.0

    def end(self) -> dict[str, Sums]:
        """What has been taken, and no more from now on."""
        sums, self._sums, self.is_open, self.takes = self._sums, {}, False, False
        self._flat, self._numbers = torch.empty(0), torch.empty(0)
        return sums

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        """Sum what has been taken over a group, whose ranks have the same layers and call it together."""
        if group is not None:
            dist.all_reduce(self._flat, group=group)
            dist.all_reduce(self._numbers, group=group)

    def total(self, group: dist.ProcessGroup | None) -> dict[str, Sums]:
        """Sums over a group of what has been taken so far, which goes on; its ranks call it together."""
        flat, numbers = self._flat, self._numbers
        self._flat, self._numbers = flat.clone(), numbers.clone()
        self.reduce(group)
        total = self._views()
        self._flat, self._numbers = flat, numbers
        return total

    def add(self, name: str, sums: Sequence[Tensor]) -> None:
        """Take in what a layer has had before."""
        for own, other in zip(self._sums[name], sums, strict=True):
            own += other.to(own)

    def remove(self) -> None:
        """Let modules alone."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.end()

    def _shapes(self) -> list[tuple[torch.Size, torch.Size]]:
        """Of each layer's A and G."""
        layers = self.layers.values()
        return [(torch.Size(shape_of_inputs(layer)), torch.Size((layer.rows, layer.rows))) for layer in layers]

    def _views(self) -> dict[str, Sums]:
        shapes = self._shapes()
        views = iter(self._flat.split([shape.numel() for pair in shapes for shape in pair]))
        found = {}
        for name, pair, number in zip(self.layers, shapes, self._numbers.unbind(), strict=True):
            found[name] = Sums(next(views).view(pair[0]), next(views).view(pair[1]), number)
        return found

    def _called(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        if not self.takes or not output.requires_grad:
            return
        layer, device = self.layers[name], self._device.type
        with torch.no_grad(), torch.autocast(device, enabled=False):
            inputs = layer.inputs(args, kwargs)
            moment, counted = layer.moment(inputs, self._dtype), layer.counted(inputs)
        output.register_hook(partial(self._passed, name, moment, counted))

    def _passed(self, name: str, moment: tuple[Tensor, Tensor], counted: Tensor | None, gradient: Tensor) -> None:
        if not (self.takes and self.is_own()):
            return
        sums, layer = self._sums[name], self.layers[name]
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            slopes = layer.slopes(gradient.detach()).to(self._dtype)
            slopes = slopes if self.weight == 1.0 else slopes * self.weight
            slopes = slopes if counted is None else slopes * counted
            sums.inputs.add_(moment[0])
            sums.number.add_(moment[1])
            sums.slopes.addmm_(slopes.T, slopes)


def _always() -> bool:
    return True


def shape_of_inputs(layer: Layer) -> tuple[int, ...]:
    """Of a layer's A, a vector if that is diagonal."""
    return (layer.columns,) if layer.is_diagonal else (layer.columns, layer.columns)
