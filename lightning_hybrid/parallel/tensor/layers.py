"""Linear layers with a dealt-out weight, and how inputs enter them (Shoeybi et al. 2019, arXiv:1909.08053)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from lightning_hybrid.compat import assert_on_device, in_backward, version
from lightning_hybrid.functional import splits
from lightning_hybrid.functional.splits import Split
from lightning_hybrid.parallel.tensor.axis import (
    Again,
    TensorAxis,
    gather_and_enter,
    reduce,
    reduce_to_part,
    refuse_second_derivative,
)
from lightning_hybrid.parallel.tensor.elementwise import argument, each_element, entered, taken
from lightning_hybrid.parallel.tensor.split_tensor import (
    SplitTensor,
    part_of,
    rules,
    shape_of,
    split_of,
    whole,
    wrap,
)

KEPT = 2  # inputs whose entry is remembered: of a cross-attention, the decoder's and the encoder's


@rules("linear")
def _linear(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return linear(*(argument(args, kwargs, i, name) for i, name in enumerate(("input", "weight", "bias"))))


def linear(tensor: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """Input @ weight.T + bias.

    Args:
        tensor: [..., n]: plain, a sequence shard, or the features that a weight with columns of the same split takes.
        weight: [m, n]: split on its first dimension (column-parallel), its second (row-parallel), or plain.
        bias: [m].
    """
    split = split_of(weight)
    if split is None:
        return _with_whole_weight(tensor, weight, bias)
    axis: TensorAxis = weight.axis  # type: ignore[attr-defined]
    if split.dim == 0:
        whole, again = entered_once(tensor, axis)
        if bias is not None:
            bias = part_of(bias) if split_of(bias) else taken(bias, split, axis)
        weight = part_of(weight)
        if again is None:
            result = F.linear(whole, weight, bias)
        else:
            result = _regathered(whole, weight, bias, part_of(tensor), again)
        return wrap(result, split.moved(result.ndim - 1), axis)
    features = split_of(tensor)
    if features is None:
        tensor = wrap(taken(tensor, split.moved(tensor.ndim - 1), axis), split.moved(tensor.ndim - 1), axis)
    elif features != split.moved(tensor.ndim - 1):
        return NotImplemented
    return _plus_bias(reduced(F.linear(part_of(tensor), part_of(weight)), axis), bias)


def _with_whole_weight(tensor: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """Of each position for itself."""
    split = split_of(tensor)
    if split is None or split.dim == tensor.ndim - 1 or split_of(bias):
        return NotImplemented
    axis: TensorAxis = tensor.axis  # type: ignore[attr-defined]
    parameters = [entered(p, axis) for p in (weight, bias) if p is not None]
    return wrap(F.linear(part_of(tensor), *parameters), split, axis)


def reduced(partial: Tensor, axis: TensorAxis) -> Tensor:
    """The sum of the ranks' results: a sequence shard in a block with sequence parallelism, else whole."""
    sequence = axis.recomputed if axis.sequence is None and in_backward() else axis.sequence
    if sequence is not None:
        split, hidden = sequence
        leading = splits.view(split, hidden[:-1], tuple(partial.shape[:-1]), axis.size)
        if leading is not None:
            return wrap(reduce_to_part(partial, leading, axis), leading, axis)
    return reduce(partial, axis)


def _plus_bias(tensor: Tensor, bias: Tensor | None) -> Any:
    """Once, after the sum."""
    if bias is None:
        return tensor
    if torch.is_autocast_enabled(bias.device.type) and bias.dtype != tensor.dtype:  # as inside a linear layer
        kept = wrap(part_of(bias).to(tensor.dtype), None, bias.axis) if isinstance(bias, SplitTensor) else None
        bias = bias.to(tensor.dtype) if kept is None else kept
    if split_of(tensor):
        return each_element("add", torch.add, (tensor, bias), {})
    return tensor + whole(bias)


def entered_once(tensor: Tensor, axis: TensorAxis) -> tuple[Tensor, Again | None]:
    """The input of column-parallel layers, entered once for all layers that take the same tensor.

    Returns:
        A plain whole tensor, and how to gather it again if it is not to be kept.
    """
    graded = tensor.requires_grad and torch.is_grad_enabled()
    for known, old, was_graded, result, again in axis.entered:
        if known is tensor and old == version(tensor) and was_graded == graded:
            return result, again
    split, again = split_of(tensor), None
    if in_backward():  # a checkpoint within the block's forward recomputes it without the block
        axis.recomputed = None if split is None else (split, shape_of(tensor))
    if split is None:
        result = entered(tensor, axis)
    else:
        again = Again(split, axis) if axis.regather and torch.is_grad_enabled() else None
        result = gather_and_enter(part_of(tensor), split, axis, again)
    axis.entered.append((tensor, version(tensor), graded, result, again))
    del axis.entered[:-KEPT]
    return result, again


def _regathered(whole: Tensor, weight: Tensor, bias: Tensor | None, part: Tensor, again: Again) -> Tensor:
    device = whole.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        whole, weight = whole.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    result: Tensor = _RegatheredLinear.apply(whole, weight, bias, part.detach(), again)
    return result


class _RegatheredLinear(Function):
    """A linear layer that keeps its input's shard only."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: Tensor, bias: Tensor | None, part: Tensor, again: Again) -> Tensor:
        ctx.save_for_backward(weight, part)  # what is kept stands among saved tensors, for hooks of others
        ctx.again, ctx.has_bias, ctx.dtype = again, bias is not None, tensor.dtype
        return F.linear(tensor, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("sequence_parallel='regather'")
        weight, part = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        of_weight = rows.t() @ ctx.again.whole(part).to(ctx.dtype).flatten(0, -2) if ctx.needs_input_grad[1] else None
        of_input = gradient @ weight if ctx.needs_input_grad[0] else None
        return of_input, of_weight, rows.sum(0) if ctx.has_bias else None, None, None


@rules("embedding")
def _embedding(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank looks up its rows and the ranks add up; of a plain table, each position for itself."""
    indices, weight = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "weight")
    rest = (*args[2:], *([None] * (5 - len(args[2:]))))
    names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    options = {n: kwargs.get(n, value) for n, value in zip(names, rest, strict=False)}
    if func is not F.embedding:
        return NotImplemented  # torch.embedding takes the table first
    split, axis = split_of(weight), (weight if isinstance(weight, SplitTensor) else indices).axis
    if options["max_norm"] is not None or options["scale_grad_by_freq"] or options["sparse"]:
        return NotImplemented
    if split is None:
        positions = split_of(indices)
        if positions is None:
            return NotImplemented
        return wrap(F.embedding(part_of(indices), entered(weight, axis), options["padding_idx"]), positions, axis)
    if split_of(indices) or split.dim != 0 or len(split.sections) > 1:
        return NotImplemented
    (begin, end), *_ = splits.bounds(split, axis.size, axis.rank)
    absent = (indices < begin) | (indices >= end)
    _check_indices(indices, split)
    padding = options["padding_idx"]
    padding = None if padding is None else padding + (split.length if padding < 0 else 0) - begin
    padding = padding if padding is not None and 0 <= padding < end - begin else None
    rows = F.embedding((indices - begin).masked_fill(absent, 0), part_of(weight), padding)
    return reduce(rows.masked_fill(absent.unsqueeze(-1), 0), axis)


def _check_indices(indices: Tensor, split: Split) -> None:
    """What a whole table refuses would count as another rank's row here."""
    wrong = ((indices < 0) | (indices >= split.length)).any()
    if indices.device.type != "cpu":
        assert_on_device(~wrong)
    elif bool(wrong):
        raise IndexError(f"index out of range in an embedding of {split.length} rows: {int(indices.max())}.")
