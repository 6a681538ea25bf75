"""Natural gradients in the place of gradients, whole or dealt out."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.functional.kfac import clipping_factor
from lightning_hybrid.parallel.checkpoint.parts import Part
from lightning_hybrid.parallel.curvature.factors import RunningFactors
from lightning_hybrid.parallel.curvature.layers import Layer
from lightning_hybrid.parallel.curvature.wholes import WholeGradients


class NaturalGradients:
    """Preconditions the gradients of this rank's layers.

    Args:
        layers: By name.
        factors: Their factors.
        counted: Layers that this rank counts in sums over the world.
        group: Ranks that have the same layers; None for one alone.
        device: Where wholes are made.
    """

    def __init__(
        self,
        layers: Mapping[str, Layer],
        factors: RunningFactors,
        counted: Collection[str],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._layers, self._factors, self._counted, self._device = layers, factors, counted, device
        self._wholes = WholeGradients(group, device)

    def install(self, parts: Mapping[str, Part], rates: Mapping[str, float], kl_clip: float | None) -> float:
        """Put natural gradients where gradients are; all ranks of the world call it together.

        Args:
            parts: Views of gradients, by the names of parameters. A layer without its weight's or its bias's, as one
                that has been frozen since, is left alone.
            rates: Learning rates, by layer.
            kl_clip: As of `clipping_factor`.

        Returns:
            What natural gradients have been multiplied by.
        """
        names = [
            name for name, layer in self._layers.items() if all(f"{name}.{own}" in parts for own in layer.parameters)
        ]
        self._wholes.plan(parts, [own for name in names for own in (f"{name}.weight", f"{name}.bias")])
        product = torch.zeros((), dtype=torch.float64, device=self._device)
        changed: list[Tensor] = []
        for name in names:
            found = self._one(name, parts)
            if found is None:
                continue
            pieces, inner = found
            changed += pieces
            if name in self._counted:
                product += rates[name] ** 2 * inner.double()
        factor = 1.0
        if kl_clip is not None:
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.all_reduce(product)
            factor = clipping_factor(float(product), kl_clip)
        if factor != 1.0:
            for piece in changed:
                piece.mul_(factor)
        return factor

    def _one(self, name: str, parts: Mapping[str, Part]) -> tuple[list[Tensor], Tensor] | None:
        """Changed pieces of a layer, and the product of its gradient and natural gradient."""
        layer, own = self._layers[name], {key: parts.get(f"{name}.{key}") for key in ("weight", "bias")}
        held = {key: part for key, part in own.items() if part is not None}
        wholes = {key: self._wholes.whole(f"{name}.{key}", part) for key, part in held.items()}
        gradient = layer.matrix(wholes["weight"], wholes.get("bias"))
        natural = self._factors.natural(name, gradient)
        if natural is None:
            return None
        inner = (gradient.double() * natural.double()).sum()  # of the gradient, whose memory is written to next
        for key, whole in zip(("weight", "bias"), layer.split(natural), strict=True):
            if whole is not None:
                self._wholes.put_back(held[key], whole)
        pieces = [piece.data for part in held.values() for piece in part.pieces]
        return pieces, inner
