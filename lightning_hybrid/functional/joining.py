"""Joins what a step returned for parts of a batch into what it would have returned for the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.functional.trees import children_of, leaves_of, unflatten

CONSTANTS = (bool, int, float, complex, str, bytes, type(None))


def join(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Concatenate the outputs of a batch's parts, sample by sample.

    Args:
        parts: Output of each part: nested containers of tensors `[n, ...]`, lists of `n` things, or constants that are
            the same for every part.
        sizes: Samples `n` of each part.

    Returns:
        The same structure for all samples, in the order of the parts; one part alone as it is, whatever it is.

    Raises:
        ValueError: If something is neither one value a sample nor the same for all parts.
    """
    if len(parts) == 1:
        return parts[0]
    if all(_is_per_sample(part, size) for part, size in zip(parts, sizes, strict=True)):
        return _concatenate(parts)
    children, nodes = zip(*(children_of(part) for part in parts), strict=True)
    if nodes[0] is None or any(node != nodes[0] for node in nodes):
        return _constant(parts, sizes)
    return unflatten([join(column, sizes) for column in zip(*children, strict=True)], nodes[0])


def reorder(value: Any, order: Sequence[int]) -> Any:
    """Put the samples of what `join` returned into another order.

    Args:
        value: From `join`.
        order: For each place, which sample comes there.
    """
    if isinstance(value, Tensor) and value.ndim and len(value) == len(order):
        return value[torch.tensor(order, device=value.device)]
    if _is_per_sample(value, len(order)):
        return type(value)(value[i] for i in order)
    children, node = children_of(value)
    return value if node is None else unflatten([reorder(child, order) for child in children], node)


def _is_per_sample(value: Any, size: int) -> bool:
    """A tensor with a first dimension of `size`, or a plain list (or tuple without tensors) of `size` things."""
    if isinstance(value, Tensor):
        return value.ndim > 0 and len(value) == size
    if type(value) not in (list, tuple) or len(value) != size:
        return False
    tensors = [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]
    if isinstance(value, tuple):
        return size > 0 and not tensors
    # a list of `size` tensors, each for all samples, is a container: a model may return several of them
    return not (size > 0 and all(isinstance(child, Tensor) and _is_per_sample(child, size) for child in value))


def _concatenate(parts: Sequence[Any]) -> Any:
    if not isinstance(parts[0], Tensor):
        return type(parts[0])(item for part in parts for item in part)
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        raise ValueError(
            f"predict_step returned tensors of shapes {[list(part.shape) for part in parts]} for parts of one batch, "
            "which cannot be joined. Return a list with one tensor a sample, pad to one length, or set "
            "num_microbatches=1."
        )
    return torch.cat(list(parts))


def _constant(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = parts[0]
    if isinstance(first, CONSTANTS) and all(type(part) is type(first) and part == first for part in parts):
        return first
    kinds = ", ".join(sorted({_kind(part) for part in parts}))
    raise ValueError(
        f"predict_step returned {kinds} for parts of a batch with {list(sizes)} samples: neither a value for each "
        "sample nor the same for all, so that the parts cannot be joined. Return tensors whose first dimension counts "
        "samples, or lists with one entry a sample; or set num_microbatches=1, without replicas."
    )


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"a mapping with {list(value)}"
    return f"{type(value).__name__} of length {len(value)}" if isinstance(value, list | tuple) else type(value).__name__
