"""Losses of logits whose classes are dealt out, without gathering them (arXiv:1909.08053, section 3).

Three numbers a position travel: the largest logit, the sum of exponentials, and the target's logit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from lightning_hybrid.compat import assert_on_device
from lightning_hybrid.functional import splits
from lightning_hybrid.functional.splits import Split
from lightning_hybrid.parallel.tensor.alongside import along
from lightning_hybrid.parallel.tensor.axis import TensorAxis, enter, reduce, refuse_second_derivative
from lightning_hybrid.parallel.tensor.elementwise import argument
from lightning_hybrid.parallel.tensor.split_tensor import SplitTensor, part_of, rules, shape_of, split_of, wrap


@rules("cross_entropy", "cross_entropy_loss")
def _cross_entropy(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As `torch.nn.functional.cross_entropy` of class indices; half-precision logits are taken in float32."""
    logits, target = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "target")
    weight, smoothing = argument(args, kwargs, 2, "weight"), argument(args, kwargs, 7, "label_smoothing", 0.0)
    split, classes = split_of(logits), 1 if logits.ndim > 1 else 0
    old_style = argument(args, kwargs, 3, "size_average"), argument(args, kwargs, 5, "reduce")
    if split is None or split.dim != classes or len(split.sections) > 1 or old_style != (None, None):
        return NotImplemented
    if isinstance(target, SplitTensor) or target.is_floating_point() or (smoothing and weight is not None):
        return NotImplemented
    ignored, reduction = argument(args, kwargs, 4, "ignore_index", -100), argument(args, kwargs, 6, "reduction", "mean")
    picked, average = _TargetLogProbability.apply(part_of(logits), target, split, logits.axis, ignored, bool(smoothing))
    loss = -(1 - smoothing) * picked - smoothing * average if smoothing else -picked
    return _as_torch_returns(_combine(loss, target, weight, ignored, reduction), part_of(logits))


@rules("nll_loss", "nll_loss_nd")
def _nll_loss(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    scores, target = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "target")
    weight, split, classes = argument(args, kwargs, 2, "weight"), split_of(scores), 1 if scores.ndim > 1 else 0
    old_style = argument(args, kwargs, 3, "size_average"), argument(args, kwargs, 5, "reduce")
    if split is None or split.dim != classes or len(split.sections) > 1 or old_style != (None, None):
        return NotImplemented
    if isinstance(target, SplitTensor):
        return NotImplemented
    ignored, reduction = argument(args, kwargs, 4, "ignore_index", -100), argument(args, kwargs, 6, "reduction", "mean")
    index = target.masked_fill(target == ignored, 0).unsqueeze(classes)
    picked = _pick(part_of(scores), index, split, scores.axis).squeeze(classes)
    return _as_torch_returns(_combine(-_widened(picked), target, weight, ignored, reduction), picked)


def _combine(loss: Tensor, target: Tensor, weight: Tensor | None, ignored: int, reduction: str) -> Tensor:
    """Loss of each position, weighted by class, as `reduction` says; a position with an ignored target counts as 0."""
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    counted = target != ignored
    weights = counted.to(loss.dtype)
    if weight is not None:
        weights = weights * weight.to(loss.dtype)[target.masked_fill(~counted, 0)]
    loss = torch.where(counted, loss, 0) * weights
    if reduction == "none":
        return loss
    return loss.sum() / weights.sum() if reduction == "mean" else loss.sum()


@rules("gather", "take_along_dim")
def _gather(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Scores of the classes that an index picks."""
    scores, split = args[0], split_of(args[0])
    first, second = ("dim", "index") if name == "gather" else ("indices", "dim")
    one, two = argument(args, kwargs, 1, first), argument(args, kwargs, 2, second)
    dim, index = (one, two) if name == "gather" else (two, one)
    if split is None or not isinstance(dim, int) or isinstance(index, SplitTensor) or len(split.sections) > 1:
        return NotImplemented
    if dim % scores.ndim != split.dim or (name == "take_along_dim" and _broadcasts(shape_of(scores), index, split.dim)):
        return NotImplemented
    return _pick(part_of(scores), index, split, scores.axis)


def _broadcasts(shape: tuple[int, ...], index: Tensor, dim: int) -> bool:
    return index.ndim != len(shape) or any(n != index.shape[i] for i, n in enumerate(shape) if i != dim)


@rules("logsumexp")
def _log_sum_exp(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, split, given = args[0], split_of(args[0]), argument(args, kwargs, 1, "dim")
    dims = list(given) if isinstance(given, tuple | list) else [given]
    if split is None or [dim % tensor.ndim for dim in dims] != [split.dim]:
        return along(name, func, args, kwargs)
    part = part_of(tensor)
    result: Tensor = _LogSumExp.apply(_widened(part), split.dim, tensor.axis)
    result = result.to(part.dtype)
    return result if argument(args, kwargs, 2, "keepdim", False) else result.squeeze(split.dim)


@rules("argmax", "max")
def _largest(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The largest of the ranks' largest scores, and where it is; the first one of equals."""
    scores, split = args[0], split_of(args[0])
    dim, keep = argument(args, kwargs, 1, "dim"), argument(args, kwargs, 2, "keepdim", False)
    if split is None or not isinstance(dim, int):
        return NotImplemented
    dim %= scores.ndim
    if dim != split.dim:
        return along(name, func, args, kwargs)
    if len(split.sections) > 1 or split.length < scores.axis.size:
        return NotImplemented
    part, axis = part_of(scores), scores.axis
    values, indices = part.detach().max(dim, keepdim=True)
    (begin, _), *_ = splits.bounds(split, axis.size, axis.rank)
    of_ranks = Split(dim, (axis.size,))
    best = axis.gather(values, of_ranks).argmax(dim, keepdim=True)
    index = axis.gather(indices + begin, of_ranks).gather(dim, best)
    if name == "argmax":
        return index if keep else index.squeeze(dim)
    picked = _pick(part, index, split, axis)
    return torch.return_types.max((picked, index) if keep else (picked.squeeze(dim), index.squeeze(dim)))


def _pick(scores: Tensor, index: Tensor, split: Split, axis: TensorAxis) -> Tensor:
    (begin, end), *_ = splits.bounds(split, axis.size, axis.rank)
    absent = (index < begin) | (index >= end)
    local = (index - begin).masked_fill(absent, 0)
    return reduce(scores.gather(split.dim, local).masked_fill(absent, 0), axis)


@rules("log_softmax", "softmax")
def _softmax(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, split = args[0], split_of(args[0])
    dim = argument(args, kwargs, 1, "dim")
    dtype = next((a for a in (*args[2:], kwargs.get("dtype")) if isinstance(a, torch.dtype)), None)
    if split is None or not isinstance(dim, int):
        return NotImplemented
    if dim % tensor.ndim != split.dim:
        return wrap(func(*args, **kwargs), split, tensor.axis)
    part = part_of(tensor) if dtype is None else part_of(tensor).to(dtype)
    result: Tensor = _LogSoftmax.apply(_widened(part), split.dim, tensor.axis)
    result = (result.exp() if name == "softmax" else result).to(result.dtype if _autocasts(part) else part.dtype)
    return wrap(result, split, tensor.axis)


def _autocasts(tensor: Tensor) -> bool:
    """Whether softmax and losses are to be computed, and returned, in float32."""
    return torch.is_autocast_enabled(tensor.device.type)


def _as_torch_returns(loss: Tensor, scores: Tensor) -> Tensor:
    return loss if _autocasts(scores) else loss.to(scores.dtype)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _exponentials(logits: Tensor, dim: int, axis: TensorAxis) -> tuple[Tensor, Tensor, Tensor]:
    """exp(logits - largest), its sum over all classes, and the largest logit of all classes."""
    largest = logits.amax(dim, keepdim=True)
    axis.sum(largest, dist.ReduceOp.MAX)
    exponentials = (logits - largest).exp_()
    return exponentials, axis.sum(exponentials.sum(dim, keepdim=True)), largest


class _TargetLogProbability(Function):
    """Log-probability of the target class, and on demand the mean over all classes; neither needs the others' logits.

    The gradient is that of -log p: one minus probability at the target, minus probability elsewhere.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, split: Split, axis: TensorAxis, ignored: int, averaged: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.dtype, wide, dim = logits.dtype, _widened(logits), split.dim
        exponentials, total, largest = _exponentials(wide, dim, axis)
        (begin, end), *_ = splits.bounds(split, axis.size, axis.rank)
        index = target.unsqueeze(dim)
        absent = (index < begin) | (index >= end)
        index = (index - begin).masked_fill(absent, 0)
        of_target = wide.gather(dim, index).masked_fill_(absent, 0)
        axis.sum(of_target)
        log_total = total.log()
        picked = (of_target - largest - log_total).squeeze(dim)
        average = picked.new_zeros(())
        if averaged:
            average = (axis.sum(wide.sum(dim, keepdim=True)) / split.length - largest - log_total).squeeze(dim)
        ctx.save_for_backward(exponentials.div_(total), index, absent, target == ignored)
        ctx.dim, ctx.length, ctx.averaged = dim, split.length, averaged
        _check_targets(target, ignored, split.length)
        return picked, average

    @staticmethod
    def backward(ctx: Any, of_picked: Tensor, of_average: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative("The cross-entropy of split logits")
        probabilities, index, absent, ignored = ctx.saved_tensors
        of_picked = of_picked.masked_fill(ignored, 0).unsqueeze(ctx.dim).to(probabilities.dtype)
        weight = of_picked
        if ctx.averaged:
            of_average = of_average.masked_fill(ignored, 0).unsqueeze(ctx.dim).to(probabilities.dtype)
            weight = of_picked + of_average
        gradient = probabilities * -weight
        gradient.scatter_add_(ctx.dim, index, of_picked.masked_fill(absent, 0))
        if ctx.averaged:
            gradient += of_average / ctx.length
        return gradient.to(ctx.dtype), None, None, None, None, None


class _LogSoftmax(Function):
    """Over a dealt-out dimension."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, dim: int, axis: TensorAxis) -> Tensor:
        _, total, largest = _exponentials(logits, dim, axis)
        result = logits - largest - total.log()
        ctx.save_for_backward(result)
        ctx.dim, ctx.axis = dim, axis
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (result,) = ctx.saved_tensors
        total = enter(reduce(gradient.sum(ctx.dim, keepdim=True), ctx.axis), ctx.axis)
        return gradient - result.exp() * total, None, None


class _LogSumExp(Function):
    """Over a dealt-out dimension, which is kept with length 1."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, dim: int, axis: TensorAxis) -> Tensor:
        exponentials, total, largest = _exponentials(logits, dim, axis)
        ctx.save_for_backward(exponentials.div_(total))
        return total.log() + largest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivative("The logsumexp of split logits")
        (probabilities,) = ctx.saved_tensors
        return gradient * probabilities, None, None


def _check_targets(target: Tensor, ignored: int, classes: int) -> None:
    """What torch refuses would count as another rank's class here."""
    wrong = ((target < 0) | (target >= classes)) & (target != ignored)
    if target.device.type != "cpu":
        assert_on_device(~wrong.any())
    elif bool(wrong.any()):
        raise IndexError(f"Target {int(target[wrong][0])} is out of bounds: there are {classes} classes.")
