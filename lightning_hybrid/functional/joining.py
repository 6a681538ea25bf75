"""Joins what a step returned for parts of a batch into what it would have returned for the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.functional.trees import children_of, unflatten

CONSTANTS = (bool, int, float, complex, str, bytes, type(None))


def join(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Concatenate the outputs of a batch's parts, sample by sample.

    What a thing is does not depend on how many samples there are: a tensor `[n, ...]` and a list have one entry a
    sample, tuples and mappings hold several things.

    Args:
        parts: Output of each part: tensors, lists, constants that are the same for every part, and nested tuples and
            mappings of them.
        sizes: Samples `n` of each part.

    Returns:
        The same structure for all samples, in the order of the parts; one part alone as it is, whatever it is.

    Raises:
        ValueError: If something is neither one value a sample nor the same for all parts, or could be both.
    """
    if len(parts) == 1:
        return parts[0]
    kinds = {type(part) for part in parts}
    if isinstance(parts[0], Tensor) or kinds == {list}:
        return _concatenate(parts, sizes)
    if kinds == {tuple} and all(_may_be_samples(part, size) for part, size in zip(parts, sizes, strict=True)):
        raise ValueError(
            f"predict_step returned tuples of {len(parts[0])} constants for parts of a batch with {list(sizes)} "
            "samples: are they one for each sample, or the same for all? Return a list for the first, a dictionary for "
            "the second."
        )
    children, nodes = zip(*(children_of(part) for part in parts), strict=True)
    if nodes[0] is None or any(node != nodes[0] for node in nodes):
        return _constant(parts, sizes)
    return unflatten([join(column, sizes) for column in zip(*children, strict=True)], nodes[0])


def interleave(value: Any, sizes: Sequence[int]) -> Any:
    """Deal the samples of what `join` returned in turn: the first of each part, then the second of each, and so on.

    Args:
        value: From `join`.
        sizes: Samples of each part.
    """
    starts = list(accumulate(sizes, initial=0))
    order = [starts[part] + k for k in range(max(sizes)) for part in range(len(sizes)) if k < sizes[part]]
    return _reorder(value, order)


def _reorder(value: Any, order: list[int]) -> Any:
    if isinstance(value, Tensor):
        return value[torch.tensor(order, dtype=torch.int64, device=value.device)]
    if type(value) is list:
        return [value[i] for i in order] if value else value
    children, node = children_of(value)
    return value if node is None else unflatten([_reorder(child, order) for child in children], node)


def _may_be_samples(value: tuple[Any, ...], size: int) -> bool:
    """Such as the names of a batch that was collated from pairs of a tensor and a name."""
    return len(value) == size > 0 and all(isinstance(each, CONSTANTS) for each in value)


def _concatenate(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    if any(isinstance(part, Tensor) and part.ndim == 0 for part in parts) or [len(part) for part in parts] != [*sizes]:
        return _constant(parts, sizes)
    if not isinstance(parts[0], Tensor):
        return [item for part in parts for item in part]
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
    if all(type(part) is list and not part for part in parts):
        return first
    if isinstance(first, CONSTANTS) and all(type(part) is type(first) and part == first for part in parts):
        return first
    kinds = ", ".join(sorted({_kind(part) for part in parts}))
    raise ValueError(
        f"predict_step returned {kinds} for parts of a batch with {list(sizes)} samples: neither a value for each "
        "sample nor the same for all, so that the parts cannot be joined. Return tensors whose first dimension counts "
        "samples, lists with one entry a sample, tuples or dictionaries of them; or set num_microbatches=1, without "
        "replicas."
    )


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"a mapping with {list(value)}"
    return f"{type(value).__name__} of length {len(value)}" if isinstance(value, list | tuple) else type(value).__name__
