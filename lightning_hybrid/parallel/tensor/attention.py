"""`nn.MultiheadAttention` whose heads are dealt out: torch's own function reads the sizes of whole tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_hybrid.functional.splits import Split
from lightning_hybrid.parallel.tensor.axis import TensorAxis, gather
from lightning_hybrid.parallel.tensor.elementwise import drawn
from lightning_hybrid.parallel.tensor.layers import linear
from lightning_hybrid.parallel.tensor.split_tensor import SplitTensor, part_of, rules, shape_of, split_of, whole, wrap

SIGNATURE = inspect.signature(inspect.unwrap(F.multi_head_attention_forward))


@rules("multi_head_attention_forward")
def _multi_head_attention(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    odd = ("bias_k", "bias_v", "static_k", "static_v")
    if (
        any(given[name] is not None for name in odd)
        or given["add_zero_attn"]
        or split_of(given["out_proj_weight"]) is None
    ):
        return NotImplemented
    query, key, value = given["query"], given["key"], given["value"]
    batched = query.ndim == 3  # [length, batch, width], as torch's own function has it
    if not batched:
        return NotImplemented
    axis: TensorAxis = given["out_proj_weight"].axis
    heads, rate = given["num_heads"], given["dropout_p"] if given["training"] else 0.0
    q, k, v = (_by_head(t, heads, axis) for t in _project(given, query, key, value))
    mask = _mask(given, q, k, heads, axis)
    context, weights = _attend(q, k, v, mask, rate, given)
    length, batch = context.shape[2], context.shape[0]
    merged = context.permute(2, 0, 1, 3).reshape(length, batch, -1)
    width = shape_of(query)[-1]
    with _sequence_of(query, axis):
        output = linear(wrap(merged, Split(2, (width,)), axis), given["out_proj_weight"], given["out_proj_bias"])
    if weights is None:
        return output, None
    every = gather(weights, Split(1, (heads,)), axis)
    return output, every.mean(1) if given["average_attn_weights"] else every


@contextmanager
def _sequence_of(query: Tensor, axis: TensorAxis) -> Iterator[None]:
    """Context in which results are dealt out as the query is, whose first dimensions may have been exchanged."""
    before, split = axis.sequence, split_of(query)
    axis.sequence = None if split is None else (split, shape_of(query))
    try:
        yield
    finally:
        axis.sequence = before


def _project(given: dict[str, Any], query: Tensor, key: Tensor, value: Tensor) -> list[Any]:
    """Queries, keys and values of this rank's heads: [length, batch, width / size] each."""
    bias = given["in_proj_bias"]
    biases = [None] * 3 if bias is None else list(part_of(bias).chunk(3))
    if given["use_separate_proj_weight"]:
        weights = [part_of(given[f"{name}_proj_weight"]) for name in "qkv"]
    else:
        weights = list(part_of(given["in_proj_weight"]).chunk(3))
    axis, width = given["out_proj_weight"].axis, shape_of(query)[-1]
    rows = Split(0, (width,))
    if query is key and key is value and not given["use_separate_proj_weight"]:
        fused = Split(0, (width,) * 3)
        bias = None if bias is None else wrap(part_of(bias), fused, axis)
        together = linear(query, wrap(part_of(given["in_proj_weight"]), fused, axis), bias)
        return list(part_of(together).chunk(3, -1))
    projected = []
    for tensor, weight, one in zip((query, key, value), weights, biases, strict=True):
        one_split = None if one is None else wrap(one, rows, axis)
        projected.append(part_of(linear(tensor, wrap(weight, rows, axis), one_split)))
    return projected


def _by_head(tensor: Tensor, heads: int, axis: TensorAxis) -> Tensor:
    """[batch, this rank's heads, length, head width]."""
    length, batch, _ = tensor.shape
    return tensor.view(length, batch, heads // axis.size, -1).permute(1, 2, 0, 3)


def _mask(given: dict[str, Any], q: Tensor, k: Tensor, heads: int, axis: TensorAxis) -> Tensor | None:
    """What is added to the scores: [batch or 1, this rank's heads or 1, length, length of keys]."""
    mask, padding = whole(given["attn_mask"]), whole(given["key_padding_mask"])
    if given["is_causal"] and given["need_weights"] is False and padding is None and mask is None:
        raise RuntimeError("is_causal=True needs an attn_mask, as in torch's own nn.MultiheadAttention.")
    mask = _additive(mask, q.dtype)
    if mask is not None:
        mask = mask.view(1, 1, *mask.shape) if mask.ndim == 2 else mask.view(-1, heads, *mask.shape[1:])
        if mask.shape[1] > 1:
            mask = axis.part(mask, Split(1, (heads,)))
    if padding is not None:
        added = _additive(padding, q.dtype)
        assert added is not None
        mask = added[:, None, None, :] if mask is None else mask + added[:, None, None, :]
    return mask


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rate: float, given: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    source = given["out_proj_weight"]

    def attend() -> tuple[Tensor, Tensor | None]:
        if not given["need_weights"]:
            return F.scaled_dot_product_attention(q, k, v, mask, rate), None
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), rate)
        return weights @ v, weights

    assert isinstance(source, SplitTensor)
    return drawn(source, attend) if rate else attend()
