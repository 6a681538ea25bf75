"""Saved-tensor hooks that take some tensors, and leave the rest to hooks outside of them.

Torch asks the innermost hooks alone, so techniques that each enter hooks of their own would switch each other off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_hybrid.compat import outer_hooks, version
from lightning_hybrid.parallel.ledgers.fates import Kept


class Packed(Protocol):
    """What a graph holds in place of a tensor; it goes when the graph lets go of it."""

    def unpack(self) -> Tensor:
        """The tensor, or an equal one."""


class PassedOn:
    """What hooks outside have made of a tensor. Ledgers look into it."""

    def __init__(self, value: Any, unpack: Callable[[Any], Tensor]) -> None:
        self.value, self._unpack = value, unpack

    def unpack(self) -> Tensor:
        """What the hooks outside make of it again."""
        return self._unpack(self.value)


def keep(tensor: Tensor) -> Kept:
    """What a graph holds of a tensor that stays as it is; no graph may hold the tensor itself, which may hold it."""
    return Kept(tensor.detach(), version(tensor))


class ChainedHooks:
    """Context in which `pack` is asked first about each tensor that autograd saves.

    Args:
        pack: Returns what the graph is to hold, or None to leave the tensor to the hooks outside, if any.
    """

    def __init__(self, pack: Callable[[Tensor], Packed | None]) -> None:
        self._ask = pack
        self._hooks: saved_tensors_hooks | None = None

    def __enter__(self) -> ChainedHooks:
        self._outer = outer_hooks()
        # autograd also calls hooks from compiled code, where Dynamo would compile them
        outermost: Any = torch.compiler.disable(self.asked)
        outermost.asks = self._ask
        self._hooks = saved_tensors_hooks(outermost, torch.compiler.disable(_unpack))
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        hooks, self._hooks = self._hooks, None  # they refer to each other, and to what `pack` knows
        assert hooks is not None
        hooks.__exit__(*exception)

    def asked(self, tensor: Tensor) -> Packed:
        """What autograd calls."""
        packed = self._ask(tensor)
        return self.pass_on(tensor) if packed is None else packed

    def pass_on(self, tensor: Tensor) -> Packed:
        """Leave a tensor to the hooks outside, also later than it was saved."""
        if self._outer is None:
            return keep(tensor)
        pack, unpack = self._outer
        return PassedOn(pack(tensor), unpack)


def innermost(pack: Callable[[Tensor], Packed | None]) -> bool:
    """Whether torch would ask this function first now: a `ChainedHooks` with it is the one that was entered last."""
    outer = outer_hooks()
    return outer is not None and getattr(outer[0], "asks", None) == pack


def _unpack(packed: Packed) -> Tensor:
    return packed.unpack()
