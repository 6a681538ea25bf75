"""Losses made inside a block, on any stage, as part of the loss that the last stage returns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_WEIGHT: list[float] = [1.0]  # not a ContextVar: autograd calls backward from threads of its own
_LISTENER: ContextVar[Any] = ContextVar("listener", default=None)


class _AddGradient(torch.autograd.Function):
    """Identity on `x` whose backward also sends the weight of the micro-batch to `loss`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.new_empty(())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.full_like(ctx.like, _WEIGHT[-1])


def add_auxiliary_loss(x: Tensor, loss: Tensor) -> Tensor:
    """Add the gradient of a loss made inside a block, such as a router's balance loss, wherever the block runs.

    Training is as if `loss` had been added to what `training_step` returns; the returned and logged loss does not
    contain it. A micro-batch's auxiliary loss has the same weight as its loss: its share of the samples, or its
    `loss_weight`. Under other strategies the weight is 1, which is right without accumulation and loss scaling.

    Args:
        x: Any tensor on the way to the loss, such as the block's output; without a gradient there is no effect.
        loss: Scalar, a mean over the micro-batch.

    Returns:
        `x`, with the same values.

    Raises:
        ValueError: If `loss` is not a scalar.
    """
    if loss.numel() != 1:
        raise ValueError(f"loss must be a scalar, got shape {list(loss.shape)}.")
    out: Tensor = _add(x, loss.reshape(()))
    return out


def _add_as_written(x: Tensor, loss: Tensor) -> Any:
    listener = _LISTENER.get()
    if listener is not None:
        listener()
    return _AddGradient.apply(x, loss)


# compiled code would keep the weight of the micro-batch that it was made with
_add = torch.compiler.disable(_add_as_written)


@contextmanager
def auxiliary_weight(weight: float) -> Iterator[None]:
    """Weight of auxiliary losses in the backward passes inside the context."""
    _WEIGHT.append(weight)
    try:
        yield
    finally:
        _WEIGHT.pop()


@contextmanager
def auxiliary_listener(listener: Any) -> Iterator[None]:
    """Call `listener()` for each auxiliary loss added inside the context."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)
