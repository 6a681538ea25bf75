"""The layout that keywords and model ask for, and which blocks each stage gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_hybrid.functional import partition
from lightning_hybrid.parallel.blocks import num_parameters
from lightning_hybrid.parallel.cut import ancestors_of, outside_modules
from lightning_hybrid.parallel.mesh import Layout


def choose_layout(options: dict[str, Any], blocks: Sequence[str], world_size: int) -> Layout:
    """The layout that the keywords and the model ask for.

    Raises:
        ValueError: If sizes do not fit each other.
    """
    size, tensor, chunks = options["pipeline_parallel_size"], options["tensor_parallel_size"], options["num_chunks"]
    if size == "auto":
        fitting = [n for n in range(2, world_size // tensor + 1) if world_size // tensor % n == 0 and n <= len(blocks)]
        size = fitting[0] if fitting else 1
    layout = Layout.of_world(world_size, pipeline=size, tensor=tensor)
    if size > 1 and not blocks:
        raise ValueError(
            f"pipeline_parallel_size={size} needs blocks to cut between, and the model has no nn.ModuleList or "
            "nn.Sequential with two elements that hold parameters. Put its layers in one, or set "
            "pipeline_parallel_size=1."
        )
    if size == 1 and chunks > 1:
        raise ValueError(
            f"num_chunks={chunks} needs a pipeline, and {world_size} processes with {len(blocks)} blocks make none."
        )
    return layout


def stage_sizes(options: dict[str, Any], module: nn.Module, blocks: Sequence[str], num_stages: int) -> list[int]:
    """Blocks of each stage.

    Raises:
        ValueError: If there are fewer blocks than stages, or the given list does not fit.
    """
    wanted = options["partition"]
    if wanted == "uniform":
        return partition.uniform(len(blocks), num_stages)
    if wanted != "balanced":
        sizes = [int(size) for size in wanted]
        partition.check(sizes, len(blocks), num_stages)
        return sizes
    first, last = _cost_outside(module, blocks)
    costs = [num_parameters(module.get_submodule(block)) for block in blocks]
    return partition.balanced(costs, num_stages, first, last)


def _cost_outside(module: nn.Module, blocks: Sequence[str]) -> tuple[int, int]:
    """Parameters multiplied before the first and after the first list of blocks; an embedding only looks them up."""
    order = {name: index for index, (name, _) in enumerate(module.named_modules(remove_duplicate=False))}
    first = last = 0
    for name in outside_modules(module, ancestors_of(blocks), set(blocks)):
        if not isinstance(module.get_submodule(name), nn.Embedding):
            cost = num_parameters(module.get_submodule(name))
            first, last = (first + cost, last) if order[name] < order[blocks[0]] else (first, last + cost)
    return first, last
