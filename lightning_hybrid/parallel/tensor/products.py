"""Matrix products and attention of split tensors: on heads or rows each rank alone, over a dealt-out sum together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_hybrid.functional.splits import Split
from lightning_hybrid.parallel.tensor.axis import TensorAxis, reduce
from lightning_hybrid.parallel.tensor.elementwise import argument, drawn, each_element, entered, fitted, taken
from lightning_hybrid.parallel.tensor.split_tensor import axis_of, part_of, rules, shape_of, split_of, whole, wrap


@rules("matmul", "bmm", "mm", "__matmul__", "__rmatmul__", "mv")
def _matmul(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    a, b = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "mat2", kwargs.get("other"))
    return product(b, a) if name == "__rmatmul__" else product(a, b)


def product(a: Tensor, b: Tensor) -> Any:
    """A @ b of tensors with at least two dimensions each; NotImplemented where the ranks cannot do it in parts."""
    if a.ndim < 2 or b.ndim < 2 or not (split_of(a) or split_of(b)):
        return NotImplemented
    axis, ndim = axis_of((a, b)), max(a.ndim, b.ndim)
    at_a, at_b = _from_right(a), _from_right(b)
    if at_a == -1 or at_b == -2:
        return _summed(a, b, axis)
    if at_a is not None and at_b is not None and (at_a != at_b or at_a > -3 or not _same_sections(a, b)):
        return NotImplemented
    position = at_a if at_a is not None else at_b
    assert position is not None
    sections = (split_of(a) if at_a is not None else split_of(b)).sections  # type: ignore[union-attr]
    split = Split(ndim + position, sections)
    if position <= -3:
        if any(t.ndim >= -position and shape_of(t)[position] not in (1, split.length) for t in (a, b)):
            return NotImplemented
        left, right = (fitted(t, split, ndim, axis) for t in (a, b))
    else:  # rows of a, or columns of b: all of the other one
        left, right = (t if split_of(t) else entered(t, axis) for t in (a, b))
    return wrap(torch.matmul(part_of(left), part_of(right)), split, axis)


def _from_right(tensor: Tensor) -> int | None:
    split = split_of(tensor)
    return None if split is None else split.dim - tensor.ndim


def _same_sections(a: Tensor, b: Tensor) -> bool:
    return split_of(a).sections == split_of(b).sections  # type: ignore[union-attr]


def _summed(a: Tensor, b: Tensor, axis: TensorAxis) -> Any:
    """The dimension that is summed over is dealt out: each rank multiplies its part of both, and the results add up."""
    at_a, at_b = _from_right(a), _from_right(b)
    if at_a not in (None, -1) or at_b not in (None, -2) or (split_of(a) and split_of(b) and not _same_sections(a, b)):
        return NotImplemented
    sections = (split_of(a) or split_of(b)).sections  # type: ignore[union-attr]
    left = a if split_of(a) else taken(a, Split(a.ndim - 1, sections), axis)
    right = b if split_of(b) else taken(b, Split(b.ndim - 2, sections), axis)
    return reduce(torch.matmul(part_of(left), part_of(right)), axis)


@rules("addmm", "baddbmm")
def _add_product(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 3:
        return NotImplemented
    multiplied = product(args[1], args[2])
    if multiplied is NotImplemented:
        return NotImplemented
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    return _plus(multiplied if alpha == 1 else _scaled(multiplied, alpha), args[0], beta)


def _scaled(tensor: Tensor, factor: float) -> Any:
    return each_element("mul", torch.mul, (tensor, factor), {}) if split_of(tensor) else tensor * factor


def _plus(tensor: Tensor, addend: Tensor, beta: float) -> Any:
    if beta == 0:
        return tensor
    if not (split_of(tensor) or split_of(addend)):
        return tensor + beta * whole(addend)
    scaled = addend if beta == 1 else _scaled(addend, beta)
    return each_element("add", torch.add, (tensor, scaled), {})


@rules("einsum")
def _einsum(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    equation, operands = args[0], args[1:]
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    terms, output = _terms(equation)
    if len(terms) != len(operands):
        return NotImplemented
    letters = {t[s.dim]: s for t, o in zip(terms, operands, strict=True) if (s := split_of(o)) is not None}
    if len(letters) != 1:
        return NotImplemented
    letter, split = next(iter(letters.items()))
    axis, parts = axis_of(operands), []
    for term, operand in zip(terms, operands, strict=True):
        mine = split_of(operand)
        if mine is not None and (term[mine.dim] != letter or mine.sections != split.sections):
            return NotImplemented
        if mine is None and letter in term:
            parts.append(taken(operand, split.moved(term.index(letter)), axis))
        else:
            parts.append(part_of(operand) if mine is not None else entered(operand, axis))
    if letter in output:
        return wrap(torch.einsum(equation, *parts), split.moved(output.index(letter)), axis)
    return reduce(torch.einsum(equation, *parts).contiguous(), axis)


def _terms(equation: Any) -> tuple[list[str], str]:
    """Letters of each operand and of the result; nothing where an equation needs more than one letter a dimension."""
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return [], ""
    inputs, output = equation.replace(" ", "").split("->")
    terms = inputs.split(",")
    return ([], "") if any(len(set(term)) != len(term) for term in terms) else (terms, output)


@rules("scaled_dot_product_attention")
def _attention(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank computes its heads; query heads and the key-value heads they share are on one rank."""
    query, key, value = (argument(args, kwargs, i, n) for i, n in enumerate(("query", "key", "value")))
    mask, rate = argument(args, kwargs, 3, "attn_mask"), argument(args, kwargs, 4, "dropout_p", 0.0)
    causal = argument(args, kwargs, 5, "is_causal", False)
    options = {name: kwargs[name] for name in ("scale", "enable_gqa") if name in kwargs}
    positions = {_from_right(t) for t in (query, key, value)}
    if len(positions) > 1 or None in positions or positions == {-1} or positions == {-2}:
        return NotImplemented
    axis, split, ndim = query.axis, split_of(query), query.ndim
    assert split is not None
    several = {split_of(t).sections for t in (query, key, value)}  # type: ignore[union-attr]
    if len(several) > 1 and not all(len(s) == 1 and s[0] % axis.size == 0 for s in several):
        return NotImplemented
    if mask is not None:
        if (
            split_of(mask) is None
            and mask.ndim >= ndim - split.dim
            and mask.shape[split.dim - ndim] not in (1, split.length)
        ):
            return NotImplemented
        if split_of(mask) and (_from_right(mask) != split.dim - ndim or split_of(mask).sections != split.sections):  # type: ignore[union-attr]
            return NotImplemented
        mask = part_of(fitted(mask, split, ndim, axis))
    q, k, v = (part_of(t) for t in (query, key, value))

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, rate, causal, **options)

    return wrap(drawn(query, attend) if rate else attend(), split, axis)
