"""Modules and hooks that stand between a model and `fully_shard`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.compat import is_view
from lightning_hybrid.functional.trees import map_leaves
from lightning_hybrid.parallel.pipeline.run import Result


class Bucket(nn.Module):
    """What `fully_shard` takes for a module with some of a model's parameters; nobody calls it."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.root = root


class Step(nn.Module):
    """What `fully_shard` takes for the root: its forward returns also where the user's step leaves by an exception."""

    def __init__(self, root: nn.Module, buckets: Sequence[nn.Module]) -> None:
        super().__init__()
        self.root, self.buckets = root, nn.ModuleList(buckets)

    def forward(self, before: Callable[[], None], function: Callable[[], Result]) -> tuple[list[Tensor], Any]:
        """Run one stage once, after `before`."""
        before()
        result = function()
        return result.payload, result.output


def own_memory(module: nn.Module, args: Any, output: Any) -> Any:
    """Outputs that are no views: `fully_shard` loses sight of a view that is written to, and gathers too late."""

    def own(leaf: Any) -> Any:
        is_seen = isinstance(leaf, Tensor) and leaf.requires_grad and is_view(leaf)
        return leaf.clone() if is_seen else leaf

    return map_leaves(own, output)
