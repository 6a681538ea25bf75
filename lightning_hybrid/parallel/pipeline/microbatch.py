"""Cuts a batch into micro-batches along the first dimension of its tensors, and joins batches along it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.functional.trees import children_of, flatten, is_container, unflatten


def batch_size(batch: object) -> int:
    """Number of samples: the first dimension of the first tensor that has one, else the first list's length, else 1."""
    return next(_tensor_sizes(batch), next(_list_sizes(batch), 1))


def _tensor_sizes(batch: object) -> Iterator[int]:
    return (leaf.shape[0] for leaf in flatten(batch)[0] if isinstance(leaf, Tensor) and leaf.ndim > 0)


def _list_sizes(tree: Any) -> Iterator[int]:
    if isinstance(tree, list | tuple) and tree and not any(is_container(child) for child in tree):
        yield len(tree)
    else:
        for child in children_of(tree)[0]:
            yield from _list_sizes(child)


def check_visible(batch: object) -> None:
    """Refuse a batch whose samples cannot be counted: it could be neither cut nor weighted.

    Raises:
        TypeError: If no tensor with a dimension can be seen in it.
    """
    if next(_tensor_sizes(batch), next(_list_sizes(batch), None)) is None:
        leaves = flatten(batch)[0]
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves})) or "nothing"
        raise TypeError(
            f"The batch holds {kinds} and no tensor, so that its samples cannot be counted. Put the tensors in tuples, "
            "lists or dictionaries, or define split_batch(self, batch, num_microbatches) on the LightningModule, with "
            "parts of equally many samples or a training_step that returns a loss_weight."
        )


def split_sizes(num_samples: int, num_microbatches: int) -> list[int]:
    """Sizes as even as can be, larger ones first, none of them 0."""
    parts = max(1, min(num_samples, num_microbatches))
    return [num_samples // parts + (i < num_samples % parts) for i in range(parts)]


def split_batch(batch: Any, num_microbatches: int) -> list[Any]:
    """Cut a batch of `B` samples; tensors become views, lists of `B` things slices, constants go to each part.

    Args:
        batch: Nested containers of tensors `[B, ...]`; tensors without dimensions belong to every sample.
        num_microbatches: Number of parts, at most `B` are made.

    Returns:
        The micro-batches, with sizes that differ by at most one.

    Raises:
        ValueError: If a tensor's first dimension is not `B`.
        TypeError: If something is neither a tensor nor a constant.
    """
    return split_by(batch, split_sizes(batch_size(batch), num_microbatches))


def split_by(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut a batch, as :func:`split_batch` does, into micro-batches of `sizes` samples, which sum to all of them."""
    if len(sizes) == 1:
        return [batch]
    num_samples = batch_size(batch)
    leaves, node = flatten(_mark_samples(batch, num_samples))
    parts = [_split_leaf(leaf, sizes, num_samples) for leaf in leaves]
    return [unflatten([part[i] for part in parts], node) for i in range(len(sizes))]


def join_batches(batches: Sequence[Any]) -> Any:
    """The batch of all samples of several: :func:`split_batch` would cut it into them, if they are equally large.

    Args:
        batches: At least one, of `B_1`, `B_2`, ... samples, as of :func:`split_batch`.

    Returns:
        The same containers; tensors `[B_1 + B_2 + ..., ...]`, joined lists of samples, and what is the same in all.

    Raises:
        ValueError: If batches differ in what cannot be joined.
        TypeError: If something is neither a tensor nor a constant.
    """
    if len(batches) == 1:
        return batches[0]
    sizes = [batch_size(batch) for batch in batches]
    marked = [_mark_samples(batch, size) for batch, size in zip(batches, sizes, strict=True)]
    columns, nodes = zip(*(flatten(each) for each in marked), strict=True)
    if any(node != nodes[0] for node in nodes):
        raise ValueError(f"{_JOINING.format(len(batches))} containers of different keys or lengths. {_ONE_SHAPE}")
    return unflatten([_join_leaves(leaves, sizes) for leaves in zip(*columns, strict=True)], nodes[0])


def take_samples(batch: Any, size: int) -> Any:
    """A batch of `size` samples, made of the first ones, and of all over again where there are not so many.

    Args:
        batch: As of :func:`split_batch`.
        size: Samples wanted, at least 1.

    Returns:
        The same containers; tensors with a first dimension and lists of samples are copies.

    Raises:
        ValueError: If a tensor's first dimension is not the number of samples.
        TypeError: If something is neither a tensor nor a constant.
    """
    num_samples = batch_size(batch)
    order = [index % num_samples for index in range(size)]
    leaves, node = flatten(_mark_samples(batch, num_samples))
    return unflatten([_take_leaf(leaf, order, num_samples) for leaf in leaves], node)


def check_even(least: int, most: int) -> None:
    """Refuse numbers of micro-batches that differ between replicas, where each takes part in all gathers and sums.

    Raises:
        ValueError: With the numbers.
    """
    if least != most:
        raise ValueError(
            f"split_batch made {least} micro-batches on one replica and {most} on another, and with zero_stage 2 and 3 "
            "all replicas sum gradients after each of them. Return num_microbatches parts, or set zero_stage=1."
        )


def structure_key(batch: object) -> Hashable:
    """What a plan depends on in a micro-batch: its structure, the shapes and types of its tensors, its constants."""
    leaves, node = flatten(batch)
    return node, tuple(_leaf_key(leaf) for leaf in leaves)


def _leaf_key(leaf: object) -> tuple[object, ...]:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    if isinstance(leaf, bool) or leaf is None:
        return type(leaf), leaf
    return (type(leaf),)


class _Samples:
    """A list with one element for each sample: a leaf, not a container."""

    def __init__(self, samples: list[Any] | tuple[Any, ...]) -> None:
        self.samples = samples


def _mark_samples(tree: Any, num_samples: int) -> Any:
    """The same tree, with lists and tuples that hold one thing without tensors for each sample turned into leaves."""
    if isinstance(tree, list | tuple) and len(tree) == num_samples and not any(_holds_tensor(x) for x in tree):
        return _Samples(tree)
    children, node = children_of(tree)
    return tree if node is None else unflatten([_mark_samples(child, num_samples) for child in children], node)


def _holds_tensor(tree: object) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in flatten(tree)[0])


def _take_leaf(leaf: Any, order: list[int], num_samples: int) -> Any:
    if isinstance(leaf, _Samples):
        return type(leaf.samples)(leaf.samples[index] for index in order)
    (whole,) = _split_leaf(leaf, [num_samples], num_samples)
    if not isinstance(whole, Tensor) or whole.ndim == 0:
        return whole
    return whole.index_select(0, torch.tensor(order, device=whole.device))


_JOINING = "{} batches of the loader that are to be one batch have"
_ONE_SHAPE = (
    "Let the loader's collate_fn give all batches one form, such as one length, or do not let batches be joined."
)


def _join_leaves(leaves: Sequence[Any], sizes: Sequence[int]) -> Any:
    first, joining = leaves[0], _JOINING.format(len(leaves))
    if any(type(leaf) is not type(first) for leaf in leaves):
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves}))
        raise ValueError(f"{joining} things of types {kinds} in one place. {_ONE_SHAPE}")
    if isinstance(first, _Samples):
        return type(first.samples)(sample for leaf in leaves for sample in leaf.samples)
    if not isinstance(first, Tensor | bool | int | float | complex | str | bytes | None):
        raise TypeError(f"{joining} a {type(first).__name__}, which cannot be joined. {_ONE_SHAPE}")
    if not isinstance(first, Tensor) or first.ndim == 0:
        if any(not _same(leaf, first) for leaf in leaves):
            values = ", ".join(map(repr, leaves))
            raise ValueError(f"{joining} the values {values} in one place, of which one would count. {_ONE_SHAPE}")
        return first
    if [leaf.shape[0] for leaf in leaves] != [*sizes] or len({(leaf.shape[1:], leaf.dtype) for leaf in leaves}) > 1:
        shapes = ", ".join(f"{list(leaf.shape)} of {leaf.dtype}" for leaf in leaves)
        raise ValueError(
            f"{joining} tensors {shapes} in one place, for {', '.join(map(str, sizes))} samples: they cannot be joined "
            f"along samples. {_ONE_SHAPE}"
        )
    return torch.cat(list(leaves))


def _same(leaf: Any, other: Any) -> bool:
    return torch.equal(leaf, other) if isinstance(leaf, Tensor) else bool(leaf == other)


def _split_leaf(leaf: Any, sizes: Sequence[int], num_samples: int) -> list[Any]:
    if isinstance(leaf, _Samples):
        bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        return [leaf.samples[a:b] for a, b in pairwise(bounds)]
    if isinstance(leaf, bool | int | float | complex | str | bytes | type(None)):
        return [leaf] * len(sizes)
    if not isinstance(leaf, Tensor):
        raise TypeError(
            f"The batch holds a {type(leaf).__name__}, which cannot be cut into {len(sizes)} micro-batches. Define "
            "split_batch(self, batch, num_microbatches) on the LightningModule, or set num_microbatches=1."
        )
    if leaf.ndim == 0:
        return [leaf] * len(sizes)
    if leaf.shape[0] != num_samples:
        raise ValueError(
            f"The batch's first tensor has {num_samples} samples and another has shape {list(leaf.shape)}: it cannot "
            f"be cut into {len(sizes)} micro-batches along the first dimension. Define split_batch(self, batch, "
            "num_microbatches) on the LightningModule, or set num_microbatches=1."
        )
    return list(torch.split(leaf, list(sizes)))
