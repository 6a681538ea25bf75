"""Labels drawn from a model's own predictions, in the place of those of a batch, in whatever code computes a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Draw = Callable[[Tensor, Tensor, torch.Generator, dict[str, Any]], Tensor]


class DrawnLabelsMode(TorchFunctionMode):
    """Replaces the targets of torch's losses by draws from the distribution whose -log likelihood the loss is.

    These are `cross_entropy` and `nll_loss` (a class by its probability; entries with `ignore_index` stay),
    `binary_cross_entropy` and its form with logits (0 or 1), and `mse_loss` (a normal distribution of variance 1/2,
    whose -log likelihood is the squared difference).

    Args:
        generator: What is drawn with, on the CPU.

    Attributes:
        number: Losses whose targets have been replaced.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator, self.number = generator, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        draw = DRAWS.get(func)
        if draw is None:
            return func(*args, **kwargs)
        self.number += 1
        values = dict(zip(("input", "target"), args, strict=False)) | kwargs
        model, label = ("target", "input") if _is_swapped(values) else ("input", "target")
        with torch.no_grad():
            values[label] = draw(values[model].detach(), values[label], self._generator, values)
        return func(values.pop("input"), values.pop("target"), *args[2:], **values)


def _is_swapped(values: dict[str, Any]) -> bool:
    """Whether labels come first, as squared differences allow."""
    return values["target"].requires_grad and not values["input"].requires_grad


def _class(scores: Tensor, target: Tensor, generator: torch.Generator, values: dict[str, Any]) -> Tensor:
    """A class for each label; classes are on dimension 1, or 0 of a single sample."""
    dim = 0 if scores.ndim == 1 else 1
    rows = scores.double().softmax(dim).movedim(dim, -1)  # of log-probabilities it is what they are
    drawn = _choose(rows.flatten(0, -2) if rows.ndim > 1 else rows[None], generator).view(rows.shape[:-1])
    if target.is_floating_point():
        return F.one_hot(drawn, rows.shape[-1]).movedim(-1, dim).to(target)
    return torch.where(target == values.get("ignore_index", -100), target, drawn.to(target))


def _choose(rows: Tensor, generator: torch.Generator) -> Tensor:
    """One column of each row, by probabilities; a row's draw does not depend on the other rows' values."""
    uniform = torch.rand(len(rows), 1, generator=generator, dtype=torch.float64).to(rows.device)
    return (rows.cumsum(-1) < uniform * rows.sum(-1, keepdim=True)).sum(-1).clamp(max=rows.shape[-1] - 1)


def _bit(probability: Tensor, target: Tensor, generator: torch.Generator) -> Tensor:
    uniform = torch.rand(probability.shape, generator=generator, dtype=torch.float64).to(probability.device)
    return (uniform < probability.double()).to(target)


def _bit_of_logit(score: Tensor, target: Tensor, generator: torch.Generator, values: dict[str, Any]) -> Tensor:
    return _bit(score.double().sigmoid(), target, generator)


def _bit_of_probability(score: Tensor, target: Tensor, generator: torch.Generator, values: dict[str, Any]) -> Tensor:
    return _bit(score, target, generator)


def _number(mean: Tensor, target: Tensor, generator: torch.Generator, values: dict[str, Any]) -> Tensor:
    noise = torch.randn(mean.shape, generator=generator, dtype=torch.float64).to(mean)
    return mean + noise * 0.5**0.5


DRAWS: dict[Any, Draw] = {
    F.cross_entropy: _class,
    F.nll_loss: _class,
    F.binary_cross_entropy: _bit_of_probability,
    F.binary_cross_entropy_with_logits: _bit_of_logit,
    F.mse_loss: _number,
}
