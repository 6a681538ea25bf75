"""Operations along dimensions: of a part as of the whole where the dimension is not dealt out, sums where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_hybrid.functional.splits import Split
from lightning_hybrid.functional.trees import map_leaves
from lightning_hybrid.parallel.tensor.axis import reduce
from lightning_hybrid.parallel.tensor.elementwise import argument, entered
from lightning_hybrid.parallel.tensor.split_tensor import SplitTensor, names, part_of, rules, shape_of, split_of, wrap

REMOVING = names(
    "sum mean prod amax amin min argmin any all std var std_mean var_mean norm nansum nanmean "
    "median mode count_nonzero nanmedian aminmax"
)
KEEPING = names("cumsum cumprod cummax cummin logcumsumexp sort argsort topk flip glu softmin normalize")
POSITION = {"norm": 2, "topk": 2, "normalize": 2, "var": 1, "std": 1}


def _dims(value: Any, ndim: int) -> list[int] | None:
    """Dimensions as numbers from 0; None for all of them."""
    if value is None or value == () or value == []:
        return None
    values = value if isinstance(value, tuple | list) else [value]
    return [dim % ndim for dim in values]


@rules(*REMOVING)
def _reduce_along(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return along(name, func, args, kwargs)


def along(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reduce along dimensions, of which the dealt-out one may only be summed over."""
    tensor, split = args[0], split_of(args[0])
    if split is None or any(isinstance(a, Tensor) for a in args[1:]):
        return NotImplemented
    ndim = len(shape_of(tensor))
    position = POSITION.get(name, 1)
    given = argument(args, kwargs, position, "dim")
    if isinstance(given, bool):  # var(unbiased)
        return NotImplemented
    dims = _dims(given, ndim)
    if dims is None or split.dim in dims:
        return _sum_over_ranks(name, func, args, kwargs, dims) if name in ("sum", "mean") else NotImplemented
    keep = argument(args, kwargs, position + 1, "keepdim", False)
    if name in ("var", "std", "var_mean", "std_mean"):
        keep = kwargs.get("keepdim", args[3] if len(args) > 3 else False)
    gone = 0 if keep else sum(dim < split.dim for dim in dims)
    return _wrapped(func(*args, **kwargs), tensor, split.moved(split.dim - gone))


def _sum_over_ranks(name: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], dims: Any) -> Tensor:
    """A sum of the ranks' sums; a mean divides by the whole's number of elements."""
    tensor, shape = args[0], shape_of(args[0])
    part = part_of(tensor)
    dims = list(range(len(shape))) if dims is None else dims
    count = 1
    for dim in dims:
        count *= shape[dim]
    keep, dtype = argument(args, kwargs, 2, "keepdim", False), kwargs.get("dtype")
    total: Tensor = reduce(part.sum(dims, keepdim=bool(keep), dtype=dtype), tensor.axis)
    return total / count if name == "mean" else total


@rules("linalg_vector_norm")
def _vector_norm(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of all elements, as clipping takes it of gradients."""
    tensor, order = args[0], argument(args, kwargs, 1, "ord", 2)
    if split_of(tensor) is None or order != 2 or len(args) > 2 or set(kwargs) - {"ord"} or tensor.requires_grad:
        return NotImplemented
    part = part_of(tensor)
    wide = part.to(torch.promote_types(part.dtype, torch.float32))
    return reduce(wide.square().sum(), tensor.axis).sqrt().to(part.dtype)


@rules(*KEEPING)
def _keep_along(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, split = args[0], split_of(args[0])
    if split is None:
        return NotImplemented
    if name == "flip" and len(args) > 2:  # dimensions one by one
        args = args[0], args[1:]
    default = 1 if name == "normalize" else -1
    given = argument(args, kwargs, POSITION.get(name, 1), "dim", kwargs.get("dims", default))
    dims = _dims(given, len(shape_of(tensor)))
    if dims is None or split.dim in dims:
        return NotImplemented
    return _wrapped(func(*args, **kwargs), tensor, split)


def _wrapped(result: Any, tensor: SplitTensor, split: Split) -> Any:
    return map_leaves(lambda leaf: wrap(leaf, split, tensor.axis) if isinstance(leaf, Tensor) else leaf, result)


@rules("tril", "triu")
def _triangle(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of the last two dimensions."""
    split = split_of(args[0])
    return (
        NotImplemented
        if split is None or split.dim >= args[0].ndim - 2
        else _wrapped(func(*args, **kwargs), args[0], split)
    )


@rules("layer_norm", "rms_norm")
def _normalise(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Over the last dimensions; the gradients of weight and bias are of the rank's part only."""
    tensor = args[0]
    split, shape = split_of(tensor), argument(args, kwargs, 1, "normalized_shape")
    shape = [shape] if isinstance(shape, int) else list(shape)
    weights = [argument(args, kwargs, 2, "weight"), argument(args, kwargs, 3, "bias") if name == "layer_norm" else None]
    if split is None or split.dim >= tensor.ndim - len(shape) or any(split_of(w) for w in weights):
        return NotImplemented
    weights = [None if weight is None else entered(weight, tensor.axis) for weight in weights]
    eps = argument(args, kwargs, 4 if name == "layer_norm" else 3, "eps", 1e-5 if name == "layer_norm" else None)
    if name == "rms_norm":
        return wrap(F.rms_norm(part_of(tensor), shape, weights[0], eps), split, tensor.axis)
    return wrap(F.layer_norm(part_of(tensor), shape, weights[0], weights[1], eps), split, tensor.axis)
