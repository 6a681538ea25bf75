"""Operations on each element for itself, with broadcasting, and those along dimensions that are not dealt out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.functional.splits import Split
from lightning_hybrid.parallel.pipeline.gates import fork_random_streams, seed_random_streams
from lightning_hybrid.parallel.streams import derived_seed
from lightning_hybrid.parallel.tensor.axis import TensorAxis, enter, take
from lightning_hybrid.parallel.tensor.split_tensor import (
    SplitTensor,
    axis_of,
    names,
    part_of,
    rules,
    shape_of,
    split_of,
    wrap,
)

BINARY = names(
    "add sub mul div true_divide floor_divide remainder fmod pow maximum minimum fmax fmin atan2 hypot eq ne lt "
    "le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift "
    "bitwise_right_shift subtract multiply divide rsub lerp addcmul addcdiv where masked_fill clamp clip "
    "clamp_min clamp_max copysign nan_to_num logaddexp xlogy heaviside isclose float_power not_equal less "
    "less_equal greater greater_equal copy"
)
UNARY = names(
    "neg abs exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square sin cos tan asin acos atan sinh cosh tanh "
    "sigmoid erf erfc erfinv reciprocal sign sgn floor ceil round trunc frac logit isnan isinf isfinite "
    "logical_not bitwise_not positive negative absolute gelu silu mish relu relu6 leaky_relu elu selu celu "
    "hardtanh hardswish hardsigmoid softplus softsign tanhshrink hardshrink softshrink threshold logsigmoid "
    "log_sigmoid detach clone contiguous float double half bfloat16 int long short bool to cpu cuda type_as "
    "zero_ fill_ zeros_like ones_like full_like empty_like pin_memory alias deg2rad conj "
    "resolve_conj resolve_neg real"
)
OPERATORS = names("add sub mul truediv floordiv mod pow and or xor lshift rshift")
COMPARISONS = names("eq ne lt le gt ge")
SIGNS = ("__neg__", "__pos__", "__invert__", "__abs__")
RANDOM = names("dropout dropout_ alpha_dropout rrelu rand_like randn_like bernoulli bernoulli_")


def _spellings() -> list[str]:
    plain = [name.rstrip("_") for name in (*BINARY, *UNARY)]
    operators = [f"__{kind}{name}__" for name in OPERATORS for kind in ("", "r", "i")]
    found = [*plain, *(f"{name}_" for name in plain), *operators, *(f"__{name}__" for name in COMPARISONS), *SIGNS]
    return list(dict.fromkeys(found))


@rules(*_spellings())
def _each_element(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return each_element(name, func, args, kwargs)


@rules("get data")
def _data(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return wrap(part_of(args[0]).data, args[0].held, args[0].axis)


@rules(*RANDOM)
def _draw(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank draws for its part from a stream of its own; the step's common stream moves on by one number."""
    if name.rstrip("_").endswith("dropout"):
        rate, training = argument(args, kwargs, 1, "p", 0.5), argument(args, kwargs, 2, "training", True)
        if not rate or not kwargs.get("train", training):
            return each_element(name, func, args, kwargs)
    split_tensor = next(arg for arg in (*args, *kwargs.values()) if isinstance(arg, SplitTensor))
    return drawn(split_tensor, lambda: each_element(name, func, args, kwargs))


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str, default: Any = None) -> Any:
    """An argument that may be given either way."""
    return args[position] if len(args) > position else kwargs.get(name, default)


def drawn(tensor: SplitTensor, function: Callable[[], Any]) -> Any:
    """Call a function with random streams that differ between the ranks of the tensor's axis."""
    seed = derived_seed(int(torch.randint(2**62, ()).item()), "tensor", tensor.axis.rank)
    with fork_random_streams(tensor.device):
        seed_random_streams(seed, tensor.device)
        return function()


def each_element(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operation on each rank's elements; plain operands are cut to fit."""
    if name in ("to", "type_as"):
        return _with_type(func, args, kwargs)
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
    parts = [(tensor, split) for tensor in tensors if (split := split_of(tensor))]
    if not parts or (name == "where" and len(args) + len(kwargs) == 1):
        return NotImplemented
    axis, shape = axis_of(tensors), _broadcast([shape_of(tensor) for tensor in tensors])
    from_right = {split.dim - part.ndim for part, split in parts}
    sections = {split.sections for _, split in parts}
    if len(from_right) > 1 or len(sections) > 1:
        return NotImplemented
    split = Split(len(shape) + from_right.pop(), sections.pop())
    if split.length == 1 != shape[split.dim]:
        return NotImplemented  # the dimension itself is broadcast
    in_place = isinstance(args[0] if args else None, Tensor) and _in_place(name)
    if in_place and (split_of(args[0]) != split or shape_of(args[0]) != shape):
        return NotImplemented
    operands = [fitted(arg, split, len(shape), axis) for arg in args]
    options = {key: fitted(value, split, len(shape), axis) for key, value in kwargs.items()}
    result = func(*operands, **options)
    if in_place:
        return args[0]
    return wrap(result, split, axis) if isinstance(result, Tensor) else result


def _with_type(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In another type, or that of another tensor, of which only the type matters."""
    split = split_of(args[0])
    if split is None:
        return NotImplemented if isinstance(args[0], SplitTensor) else func(*args, **kwargs)
    return wrap(func(*args, **kwargs), split, args[0].axis)


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """As `torch.broadcast_shapes`, which is slow; shapes that do not fit are left to the operation itself."""
    ndim = max(map(len, shapes))
    padded = [(1,) * (ndim - len(shape)) + shape for shape in shapes]
    return tuple(next((n for n in lengths if n != 1), 1) for lengths in zip(*padded, strict=True))


def _in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or (
        name.startswith("__i") and name.strip("_")[1:] in OPERATORS
    )


def fitted(operand: Any, split: Split, ndim: int, axis: TensorAxis) -> Any:
    """An operand as it broadcasts against parts.

    Args:
        operand: A part of the same split, a plain tensor, or anything else.
        split: Of the result.
        ndim: Dimensions of the result.
        axis: The ranks.
    """
    if not isinstance(operand, Tensor) or split_of(operand):
        return operand
    dim = split.dim - ndim + operand.ndim
    if dim < 0 or operand.shape[dim] == 1:
        return entered(operand, axis)
    return taken(operand, split.moved(dim), axis)


def taken(tensor: Tensor, split: Split, axis: TensorAxis) -> Tensor:
    """This rank's part of a whole value; of a parameter whose gradient is summed later, that of the part stays so."""
    return axis.part(part_of(tensor), split) if isinstance(tensor, SplitTensor) else take(tensor, split, axis)


def entered(tensor: Tensor, axis: TensorAxis) -> Tensor:
    """A whole value that the ranks use in different ways; a gradient that is summed later is not summed here."""
    return part_of(tensor) if isinstance(tensor, SplitTensor) else enter(tensor, axis)
