"""Where a rank has the gradients of an accumulation window that goes on, and what they still have to be added to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Place:
    """Where the gradient of one parameter is between two batches of a window, until the end of which it is not whole.

    Attributes:
        kind: What is there: "all" is summed over the data axis, on all of its ranks; "data" is one replica's own;
            "copy" is summed over the shards of one copy (HSDP), and not over the copies.
        index: Of the replica or copy.
        count: How many of them there are.
        get: The gradient: a DTensor where it is sharded; None if there is none yet.
        empty: Makes a tensor for it, of its shape, type and device.
        put: Lets it be one that `empty` has made.
    """

    kind: Literal["all", "data", "copy"]
    index: int
    count: int
    get: Callable[[], Tensor | None]
    empty: Callable[[], Tensor]
    put: Callable[[Tensor], None]

    @property
    def names(self) -> list[str]:
        """Names of the places of its kind on all ranks, that of the first one first."""
        return ["all"] if self.kind == "all" else [f"{self.kind}{index}" for index in range(self.count)]


def on_parameter(parameter: nn.Parameter, kind: Literal["all", "data"], index: int = 0, count: int = 1) -> Place:
    """The place where autograd has it."""

    def put(gradient: Tensor) -> None:
        parameter.grad = gradient

    return Place(kind, index, count, lambda: parameter.grad, lambda: torch.empty_like(parameter).detach(), put)
