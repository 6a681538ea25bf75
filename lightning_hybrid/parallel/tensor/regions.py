"""Sequence parallelism between the matrices of blocks (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2).

The hidden states are dealt out where the first block of a stage is called, and gathered behind the last. What crosses a
stage boundary is whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_hybrid.functional.splits import Split
from lightning_hybrid.functional.trees import flatten, leaves_of, map_leaves, unflatten
from lightning_hybrid.parallel.memory.calls import Order, surround
from lightning_hybrid.parallel.tensor.axis import TensorAxis, take
from lightning_hybrid.parallel.tensor.split_tensor import SplitTensor, part_of, shape_of, split_of, whole, wrap

REGION, WHOLE = "_lightning_hybrid_region", "_lightning_hybrid_whole"


class Region:
    """One block's place in a run of blocks.

    Attributes:
        axis: The ranks.
        is_last: The block's results are made whole.
        unwrapped: What `fully_shard`'s hook is given plain parts of, for the block's forward to put back: it loses the
            class of a tensor.
    """

    def __init__(self, axis: TensorAxis, *, is_last: bool) -> None:
        self.axis, self.is_last = axis, is_last
        self.unwrapped: list[dict[int, Split]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        return self

    def call(self, block: nn.Module, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Deal out the hidden states if they are whole."""
        if not self.axis.active:
            return proceed(*args, **kwargs)
        args, kwargs = self._dealt_out(type(block).__name__, args, kwargs)
        result = proceed(*args, **kwargs)
        self.axis.entered.clear()  # gathered inputs are not kept beyond their block
        return map_leaves(whole, result) if self.is_last else result

    def forward(self, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let row-parallel layers make shards of what they are given shards of; also when a checkpoint recomputes."""
        if self.unwrapped:
            splits = self.unwrapped.pop()
            leaves, node = flatten((args, kwargs))
            leaves = [wrap(leaf, splits[i], self.axis) if i in splits else leaf for i, leaf in enumerate(leaves)]
            args, kwargs = unflatten(leaves, node)
        hidden = next((leaf for leaf in leaves_of((args, kwargs)) if split_of(leaf)), None)
        before = self.axis.sequence
        self.axis.sequence = None if hidden is None else (hidden.held, shape_of(hidden))
        try:
            return proceed(*args, **kwargs)
        finally:
            self.axis.sequence = before

    def _dealt_out(self, block: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        leaves, node = flatten((args, kwargs))
        index = next((i for i, leaf in enumerate(leaves) if _is_hidden(leaf)), None)
        if index is None or split_of(leaves[index]):
            return args, kwargs
        hidden = leaves[index]
        split = Split(hidden.ndim - 2, (hidden.shape[-2],))
        if split.length < self.axis.size:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    f"sequence_parallel cannot deal out a sequence of {split.length} to {self.axis.size} ranks: "
                    f"{block} is given hidden states of shape {list(hidden.shape)}. Use longer sequences, or "
                    "sequence_parallel=False."
                )
            return args, kwargs
        leaves[index] = wrap(take(part_of(hidden), split, self.axis), split, self.axis)
        args, kwargs = unflatten(leaves, node)
        return args, kwargs


def _is_hidden(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim >= 2


def add_region(block: nn.Module, axis: TensorAxis, *, is_last: bool) -> None:
    """Make a block part of a run whose sequence is dealt out."""
    region = block.__dict__[REGION] = Region(axis, is_last=is_last)
    kind: Any = type(block)
    block.__class__ = _with_region(kind)
    surround(block, Order.REGION, region.forward)


@cache
def _with_region(base: Any) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        region: Region = self.__dict__[REGION]
        return region.call(self, base.__call__.__get__(self), args, kwargs)

    return _derived(base, {"__call__": call})


def bypass_sharding(root: nn.Module) -> None:
    """After `fully_shard`: its hooks get plain parts, and the block's forward gets back what they stand for."""
    for module in root.modules():
        region = vars(module).get(REGION)
        if isinstance(region, Region) and isinstance(module, FSDPModule):
            module.register_forward_pre_hook(_unwrap, prepend=True, with_kwargs=True)


def _unwrap(module: nn.Module, args: Any, kwargs: Any) -> Any:
    region: Region = module.__dict__[REGION]
    leaves, node = flatten((args, kwargs))
    splits = {i: split for i, leaf in enumerate(leaves) if (split := split_of(leaf))}
    if region.axis.active:
        region.unwrapped.append(splits)
    return unflatten([part_of(leaf) if i in splits else leaf for i, leaf in enumerate(leaves)], node)


def make_whole(module: nn.Module, axis: TensorAxis) -> None:
    """Let a module that mixes positions work on whole sequences, and deal out what it returns."""
    module.__dict__[WHOLE] = axis
    kind: Any = type(module)
    module.__class__ = _made_whole(kind)


@cache
def _made_whole(base: Any) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        axis: TensorAxis = self.__dict__[WHOLE]
        given, sequence = leaves_of((args, kwargs)), axis.sequence
        dealt_out = sequence is not None and any(split_of(leaf) for leaf in given)
        args, kwargs = map_leaves(whole, (args, kwargs))
        axis.sequence = None
        try:
            result = base.__call__.__get__(self)(*args, **kwargs)
        finally:
            axis.sequence = sequence
        if not dealt_out or sequence is None:
            return result
        split, hidden = sequence
        return map_leaves(lambda leaf: _like_hidden(leaf, split, hidden, axis), result)

    return _derived(base, {"__call__": call})


def _like_hidden(leaf: Any, split: Split, hidden: tuple[int, ...], axis: TensorAxis) -> Any:
    if not _is_hidden(leaf) or isinstance(leaf, SplitTensor) or tuple(leaf.shape[:-1]) != hidden[:-1]:
        return leaf
    return wrap(take(leaf, split, axis), split, axis)


def _derived(base: type[nn.Module], members: dict[str, Any]) -> type[nn.Module]:
    about = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), {**about, **members})
