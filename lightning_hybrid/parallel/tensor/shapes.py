"""Views, permutations, cuts and joins of split tensors, in whole sizes: where the dealt-out dimension goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.functional import splits
from lightning_hybrid.functional.splits import Split
from lightning_hybrid.parallel.tensor.axis import take
from lightning_hybrid.parallel.tensor.elementwise import argument
from lightning_hybrid.parallel.tensor.split_tensor import SplitTensor, axis_of, part_of, rules, shape_of, split_of, wrap

Result = Any  # a split tensor, several, or NotImplemented


@rules("view", "reshape", "_unsafe_view", "view_as", "reshape_as", "flatten", "unflatten", "ravel")
def _view(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    tensor = args[0]
    if split_of(tensor) is None:
        if not isinstance(tensor, SplitTensor) and name in ("view_as", "reshape_as"):
            return tensor.reshape(shape_of(args[1]))
        return NotImplemented
    shape = _new_shape(name, shape_of(tensor), args[1:], kwargs)
    return NotImplemented if shape is None else reshaped(tensor, shape, strict=name == "view")


def _new_shape(name: str, shape: tuple[int, ...], rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name in ("view_as", "reshape_as"):
        return shape_of(rest[0])
    if name == "ravel":
        return (-1,)
    if name == "flatten":
        start = argument(rest, kwargs, 0, "start_dim", 0) % len(shape)
        end = argument(rest, kwargs, 1, "end_dim", -1) % len(shape)
        return (*shape[:start], -1, *shape[end + 1 :])
    if name == "unflatten":
        dim = argument(rest, kwargs, 0, "dim")
        sizes = argument(rest, kwargs, 1, "sizes", kwargs.get("unflattened_size"))
        if not isinstance(dim, int):
            return None
        dim %= len(shape)
        return (*shape[:dim], *splits.resolve(sizes, shape[dim]), *shape[dim + 1 :])
    sizes = rest if rest else (kwargs.get("shape", kwargs.get("size", kwargs.get("dtype"))),)
    return None if isinstance(sizes[0], torch.dtype) else tuple(_sizes(sizes))


def reshaped(tensor: SplitTensor, shape: Sequence[int], *, strict: bool = False) -> Result:
    """A split tensor with another shape."""
    split, old = split_of(tensor), shape_of(tensor)
    assert split is not None
    axis, numel = tensor.axis, torch.Size(old).numel()
    new = splits.resolve(shape, numel)
    found = splits.view(split, old, new, axis.size)
    if found is None:
        return NotImplemented
    part, local = part_of(tensor), found.local_shape(new, axis.size, axis.rank)
    return wrap(part.view(local) if strict else part.reshape(local), found, axis)


def _order(
    func: Callable[..., Any], ndim: int, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> list[int]:
    """Which dimension stands where afterwards: that of a tensor whose sizes are the numbers of its dimensions."""
    key = func, ndim, str(args), str(kwargs)
    if key not in _ORDERS:
        _ORDERS[key] = list(func(torch.empty(tuple(range(ndim)), device="meta"), *args, **dict(kwargs)).shape)
    return _ORDERS[key]


_ORDERS: dict[Any, list[int]] = {}


@rules("transpose", "transpose_", "swapaxes", "swapdims", "t", "get T", "get mT", "permute", "movedim", "moveaxis")
def _permute(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    tensor, split = args[0], split_of(args[0])
    if split is None:
        return NotImplemented
    order = _order(func, len(shape_of(tensor)), args[1:], tuple(kwargs.items()))
    result = func(*args, **kwargs)
    moved = split.moved(order.index(split.dim))
    if name.endswith("_"):
        tensor.held = moved
        return tensor
    return wrap(result, moved, tensor.axis)


@rules("unsqueeze", "squeeze", "unsqueeze_", "squeeze_")
def _squeeze(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    tensor, split = args[0], split_of(args[0])
    if split is None or name.endswith("_"):
        return NotImplemented
    shape, dim = shape_of(tensor), argument(args, kwargs, 1, "dim")
    if name == "unsqueeze":
        dim %= len(shape) + 1
        return wrap(func(*args, **kwargs), split.moved(split.dim + (dim <= split.dim)), tensor.axis)
    dims = (
        range(len(shape))
        if dim is None
        else [d % len(shape) for d in (dim if isinstance(dim, tuple | list) else [dim])]
    )
    gone = [d for d in dims if shape[d] == 1 and d != split.dim]
    if split.dim in dims and split.length == 1:
        return NotImplemented
    return wrap(
        part_of(tensor).squeeze(tuple(gone)), split.moved(split.dim - sum(d < split.dim for d in gone)), tensor.axis
    )


def _sizes(given: tuple[Any, ...]) -> list[int]:
    """Sizes that are given one by one or as one sequence."""
    return list(given[0] if len(given) == 1 and not isinstance(given[0], int) else given)


@rules("view_as_complex", "view_as_real")
def _complex(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    """Pairs along the last dimension, as rotary embeddings turn them."""
    tensor, split = args[0], split_of(args[0])
    if split is None or (name == "view_as_complex" and split.dim == tensor.ndim - 1):
        return NotImplemented
    return wrap(func(part_of(tensor)), split, tensor.axis)


@rules("expand", "expand_as", "broadcast_to")
def _expand(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    tensor, split = args[0], split_of(args[0])
    if split is None:
        if name == "expand_as" and not isinstance(tensor, SplitTensor):
            return tensor.expand(shape_of(args[1]))
        return NotImplemented
    sizes = _sizes(shape_of(args[1]) if name == "expand_as" else args[1:] or (kwargs.get("size"),))
    dim = split.dim + len(sizes) - len(shape_of(tensor))
    if sizes[dim] not in (-1, split.length):
        return NotImplemented
    sizes[dim] = -1
    return wrap(part_of(tensor).expand(sizes), split.moved(dim), tensor.axis)


@rules("repeat_interleave", "repeat", "tile")
def _repeat(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    tensor, split = args[0], split_of(args[0])
    if split is None:
        return NotImplemented
    if name == "repeat_interleave":
        repeats, dim = argument(args, kwargs, 1, "repeats"), argument(args, kwargs, 2, "dim")
        if not isinstance(repeats, int) or dim is None or not split.is_even(tensor.axis.size):
            return NotImplemented
        dim %= len(shape_of(tensor))
        sections = tuple(n * repeats for n in split.sections) if dim == split.dim else split.sections
        return wrap(part_of(tensor).repeat_interleave(repeats, dim), Split(split.dim, sections), tensor.axis)
    sizes = _sizes(args[1:] or (kwargs.get("repeats", kwargs.get("dims")),))
    sizes = [1] * (len(shape_of(tensor)) - len(sizes)) + sizes
    dim = split.dim + len(sizes) - len(shape_of(tensor))
    return wrap(part_of(tensor).repeat(sizes), Split(dim, split.sections * sizes[dim]), tensor.axis)


@rules("split", "chunk", "tensor_split", "split_with_sizes", "unbind", "unsafe_chunk", "unsafe_split")
def _cut(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    tensor, split = args[0], split_of(args[0])
    if split is None:
        return NotImplemented
    shape = shape_of(tensor)
    position = 1 if name == "unbind" else 2
    dim = argument(args, kwargs, position, "dim", 0) % len(shape)
    if dim != split.dim:
        gone = name == "unbind" and dim < split.dim
        return tuple(wrap(part, split.moved(split.dim - gone), tensor.axis) for part in func(*args, **kwargs))
    if name == "unbind":
        return NotImplemented
    whole = torch.empty(shape, device="meta")  # how long each piece is
    lengths = [piece.shape[dim] for piece in func(whole, *args[1:], **kwargs)]
    found = splits.pieces(split, lengths)
    if found is None:
        return NotImplemented
    sizes = [sum(piece.shares(tensor.axis.size, tensor.axis.rank)) for piece in found]
    parts = part_of(tensor).split(sizes, dim)
    return tuple(wrap(part, piece, tensor.axis) for part, piece in zip(parts, found, strict=True))


@rules("cat", "concat", "concatenate", "stack")
def _join(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    tensors = [t for t in args[0] if name == "stack" or not (t.ndim == 1 and shape_of(t) == (0,))]
    first = next((t for t in tensors if split_of(t)), None)
    if first is None:
        return NotImplemented
    split, axis, ndim = first.held, axis_of(tensors), len(shape_of(first))
    dim = argument(args, kwargs, 1, "dim", 0) % (ndim + (name == "stack"))
    if name != "stack" and dim == split.dim:
        if not all(split_of(t) and t.held.dim == dim for t in tensors):
            return NotImplemented
        sections = tuple(section for t in tensors for section in t.held.sections)
        return wrap(torch.cat([part_of(t) for t in tensors], dim), Split(dim, sections), axis)
    if any(split_of(t) not in (None, split) for t in tensors) or any(
        isinstance(t, SplitTensor) and not t.held for t in tensors
    ):
        return NotImplemented
    if any(shape_of(t)[split.dim] != split.length for t in tensors):
        return NotImplemented
    parts = [part_of(t) if isinstance(t, SplitTensor) else take(t, split, axis) for t in tensors]
    moved = split.moved(split.dim + 1) if name == "stack" and dim <= split.dim else split
    return wrap((torch.stack if name == "stack" else torch.cat)(parts, dim), moved, axis)


@rules("narrow", "select", "__getitem__")
def _index(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    tensor, split = args[0], split_of(args[0])
    if split is None:  # or a plain tensor is indexed by a part
        return NotImplemented
    if name == "__getitem__":
        return _basic_index(tensor, split, args[1] if isinstance(args[1], tuple) else (args[1],))
    dim = argument(args, kwargs, 1, "dim") % len(shape_of(tensor))
    start = argument(args, kwargs, 2, "start" if name == "narrow" else "index")
    if name == "select":
        return _basic_index(tensor, split, (*(slice(None),) * dim, start))
    length = argument(args, kwargs, 3, "length")
    start += shape_of(tensor)[dim] if start < 0 else 0
    return _basic_index(tensor, split, (*(slice(None),) * dim, slice(start, start + length)))


def _basic_index(tensor: SplitTensor, split: Split, index: tuple[Any, ...]) -> Result:
    """Integers, slices, None and an ellipsis; the dealt-out dimension may be cut between its sections only."""
    if not all(i is None or i is Ellipsis or isinstance(i, slice) or type(i) is int for i in index):
        return NotImplemented
    shape = shape_of(tensor)
    given = sum(i is not None and i is not Ellipsis for i in index)
    at = index.index(Ellipsis) if Ellipsis in index else len(index)
    full = (*index[:at], *(slice(None),) * (len(shape) - given), *index[at + 1 :])
    positions = [k for k, i in enumerate(full) if i is not None]  # of each dimension
    mine = full[positions[split.dim]]
    if not isinstance(mine, slice) or (mine.step or 1) != 1:
        return NotImplemented
    start, stop, _ = mine.indices(split.length)
    if stop <= start:
        return NotImplemented
    found, local = split, slice(None)
    if (start, stop) != (0, split.length):
        lengths = [n for n in (start, stop - start, split.length - stop) if n]
        cut = splits.pieces(split, lengths)
        if cut is None:
            return NotImplemented
        which = 1 if start else 0
        before = sum(sum(piece.shares(tensor.axis.size, tensor.axis.rank)) for piece in cut[:which])
        found = cut[which]
        local = slice(before, before + sum(found.shares(tensor.axis.size, tensor.axis.rank)))
    local_index = list(full)
    local_index[positions[split.dim]] = local
    new_dim = sum(i is None or isinstance(i, slice) for i in full[: positions[split.dim]])
    return wrap(part_of(tensor)[tuple(local_index)], found.moved(new_dim), tensor.axis)


@rules("__setitem__")
def _write(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    """Writing a number, or a tensor that fits, into elements that an index picks from every part alike."""
    tensor, index, value = args
    if split_of(tensor) is None:
        return NotImplemented
    view = _basic_index(tensor, tensor.held, index if isinstance(index, tuple) else (index,))
    if view is NotImplemented:
        return NotImplemented
    if isinstance(value, Tensor):
        if split_of(value) != view.held or shape_of(value) != shape_of(view):
            return NotImplemented
        value = part_of(value)
    part_of(view).copy_(value) if isinstance(value, Tensor) else part_of(view).fill_(value)
    return None
