"""What a probe learned about one stage and one shape of input, and a run of the stage needs to know beforehand."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.functional.trees import Node, flatten, unflatten

Call = tuple[str, int]
"""A module's dotted name and how many times the same step had called it before."""


@dataclass(frozen=True)
class TensorSpec:
    """Geometry of a tensor that another stage makes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The geometry of `tensor`."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        """An uninitialised tensor that looks like the one described and needs no gradient."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def unknown(self, device: torch.device) -> Tensor:
        """The same filled with NaN, or the least integer: its use on a path that no probe saw cannot pass unnoticed."""
        tensor = self.empty(device)
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor.fill_(torch.nan)
        return tensor if tensor.dtype == torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).min)

    def buffer(self, device: torch.device) -> Tensor:
        """A contiguous buffer to receive it into."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class Unavailable:
    """Stands for an output, neither a tensor nor a constant, of a module that lives on another stage."""

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise RuntimeError(
            f"The step reads {attribute!r} from an object that {self.__dict__['name']} returned on another pipeline "
            "stage. Only tensors, None, booleans, integers and strings pass from block to block."
        )


@dataclass(frozen=True)
class Output:
    """What one call of a module returned.

    Attributes:
        leaves: A `TensorSpec` for each tensor, a constant as it is, `Unavailable` for anything else.
        random: The call drew random numbers.
        written: Leaves of its arguments that the call wrote in place.
    """

    leaves: tuple[Any, ...]
    node: Node | None
    random: bool = False
    written: tuple[int, ...] = ()

    @classmethod
    def of(cls, name: str, value: object, *, random: bool, written: tuple[int, ...]) -> Output:
        """Describe `value`, which the module `name` returned."""
        leaves, node = flatten(value)
        return cls(tuple(_describe(name, leaf) for leaf in leaves), node, random, written)

    def make(self, device: torch.device) -> Any:
        """A value of the same structure whose tensors hold nothing."""
        leaves = [leaf.unknown(device) if isinstance(leaf, TensorSpec) else leaf for leaf in self.leaves]
        return unflatten(leaves, self.node)


def _describe(name: str, leaf: object) -> object:
    if isinstance(leaf, Tensor):
        return TensorSpec.of(leaf)
    return leaf if leaf is None or isinstance(leaf, bool | int | str) else Unavailable(name)


@dataclass
class Needs:
    """What a stage's probes found it to use outside the blocks.

    Attributes:
        parameters: Parameters whose values matter.
        modules: Modules whose results matter.
        buffers: Buffers that it writes with true values.
    """

    parameters: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    buffers: set[str] = field(default_factory=set)

    def add(self, other: Needs) -> None:
        """Take in the needs of another probe."""
        self.parameters |= other.parameters
        self.modules |= other.modules
        self.buffers |= other.buffers


@dataclass
class Plan:
    """One stage's part in a step whose inputs have the structure and shapes of `key`.

    Attributes:
        outputs: What each call returned that this stage or an earlier one made.
        gated: Calls of modules outside the blocks whose result this stage never needs: answered with empty tensors.
        entry: Leaves of the first owned block's arguments that are received.
        replaced: Those of them that cannot be filled in place and are exchanged in the block's arguments only.
        received: Geometry of what is received, one for each of `entry`.
        checkpointed: The first owned block runs under an activation checkpoint.
        exit: Leaves of the next stage's first block's arguments that are sent.
        sent: Geometry of what is sent.
        weighted: `training_step` returns a `loss_weight`.
        auxiliary: Some stage adds an auxiliary loss.
    """

    key: Hashable
    outputs: dict[Call, Output] = field(default_factory=dict)
    gated: frozenset[Call] = frozenset()
    entry: tuple[int, ...] = ()
    replaced: frozenset[int] = frozenset()
    received: tuple[TensorSpec, ...] = ()
    checkpointed: bool = False
    exit: tuple[int, ...] = ()
    sent: tuple[TensorSpec, ...] = ()
    weighted: bool = False
    auxiliary: bool = False
