"""Arguments of a call, kept for a repetition as autograd keeps tensors: saved-tensor hooks around get them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lightning_hybrid.compat import storage_key, version
from lightning_hybrid.functional.trees import flatten, unflatten
from lightning_hybrid.parallel.tensor.split_tensor import SplitTensor, part_of, wrap

Rewrap = Callable[[Tensor], Tensor]


class _Save(Function):
    """Saves tensors, and is part of no graph of anybody's: who holds its result holds them."""

    @staticmethod
    def forward(ctx: Any, dummy: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("nobody differentiates what was only saved")


class Arguments:
    """Arguments of one call.

    Args:
        args: Positional ones.
        kwargs: The others.
        known: Says of a tensor among them whether it can be had otherwise: a key for `restored`, or None to save it.
        saving: Context in which tensors are saved; it is told those that are no parts of split ones.

    Attributes:
        saved: Tensors that are saved here, while the forward runs; parts of split ones.
        spaces: `vars` of other objects among them.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        known: Callable[[Tensor], Any],
        saving: Callable[[list[Tensor]], Any],
    ) -> None:
        leaves, self._node = flatten((args, kwargs))
        self._leaves: list[Any] = list(leaves)
        objects = (leaf for leaf in leaves if not isinstance(leaf, Tensor) and not callable(leaf))
        self.spaces = [leaf.__dict__ for leaf in objects if isinstance(getattr(leaf, "__dict__", None), dict)]
        self._tensors: list[tuple[int, Rewrap, Any, bool]] = []  # position, wrapper, key if known, needs a gradient
        self.saved: list[Tensor] = []
        plain: list[Tensor] = []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                part, self._leaves[index] = part_of(leaf), None
                key = known(part)
                self._tensors.append((index, _wrapper(leaf), key, part.requires_grad))
                if key is None:
                    self.saved.append(part)
                    plain += [leaf] if part is leaf else []
        self._versions = [version(tensor) for tensor in self.saved]
        with saving(plain):
            self._held = _Save.apply(torch.empty(0, requires_grad=True), *self.saved)

    def check(self, where: str) -> None:
        """After the call: what it got must still be what it was, and the tensors are let go of.

        Raises:
            RuntimeError: If the call has written to one of its arguments.
        """
        for tensor, before in zip(self.saved, self._versions, strict=True):
            if version(tensor) != before:
                raise RuntimeError(
                    f"{where} writes to its argument of shape {list(tensor.shape)} in place, so that it cannot be "
                    "repeated with what it got. Write it without the in-place operation, or leave the block out of "
                    "the recomputation with blocks=[...]."
                )
        self.saved = []

    def restored(self, known: Callable[[Any], Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments again, outside of any graph.

        Args:
            known: Gives what was not saved, by its key.
        """
        saved = iter(self._held.grad_fn.saved_tensors)
        leaves = list(self._leaves)
        for index, rewrap, key, needs_gradient in self._tensors:
            tensor = next(saved) if key is None else known(key)
            leaves[index] = rewrap(tensor.detach().requires_grad_(needs_gradient))
        args, kwargs = unflatten(leaves, self._node)
        return args, kwargs


def _wrapper(leaf: Tensor) -> Rewrap:
    if not isinstance(leaf, SplitTensor):
        return _same
    held, axis, parameter = leaf.held, leaf.axis, leaf.parameter

    def rewrap(part: Tensor) -> Tensor:
        result = wrap(part, held, axis)
        result.parameter = parameter
        return result

    return rewrap


def _same(tensor: Tensor) -> Tensor:
    return tensor


def place_of(tensor: Tensor) -> tuple[Any, ...]:
    """What two tensors with the same elements in the same memory have in common, as long as the memory is there."""
    if tensor.layout is not torch.strided:
        return ("sparse", id(tensor))
    geometry = tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    return (storage_key(tensor), *geometry, version(tensor), tensor.is_conj(), tensor.is_neg())
