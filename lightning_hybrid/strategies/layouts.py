"""The layout that keywords and model ask for, and which blocks each stage gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lightning_hybrid.functional import partition
from lightning_hybrid.parallel.mesh import Layout
from lightning_hybrid.strategies.costs import block_bytes, estimated_costs


def choose_layout(options: dict[str, Any], blocks: Sequence[str], world_size: int, *, masters: bool = False) -> Layout:
    """The layout that the keywords and the model ask for.

    Args:
        options: The strategy's keywords.
        blocks: Names of the model's blocks.
        world_size: Number of processes.
        masters: Parameters are float32 masters of 16-bit copies: `fully_shard` makes those in stage 0 too, where each
            replica is a copy of all shards.

    Raises:
        ValueError: If sizes do not fit each other.
    """
    size, tensor, chunks = options["pipeline_parallel_size"], options["tensor_parallel_size"], options["num_chunks"]
    if size == "auto":
        fitting = [n for n in range(2, world_size // tensor + 1) if world_size // tensor % n == 0 and n <= len(blocks)]
        size = fitting[0] if fitting else 1
    layout = Layout.of_world(
        world_size,
        pipeline=size,
        tensor=tensor,
        replicate=options.get("replicate_size", 1),
        expert=options.get("expert_parallel_size", 1),
    )
    if size > 1 and not blocks:
        raise ValueError(
            f"pipeline_parallel_size={size} needs blocks to cut between, and the model has no nn.ModuleList or "
            "nn.Sequential with two elements that hold parameters. Put its layers in one, or set "
            "pipeline_parallel_size=1."
        )
    if size == 1 and chunks > 1:
        raise ValueError(
            f"num_chunks={chunks} needs a pipeline, and {world_size} processes with {len(blocks)} blocks make none. "
            "Set num_chunks=1, or start more processes."
        )
    return replace(layout, replicate=layout.data) if masters and options["zero_stage"] == 0 else layout


@dataclass(frozen=True)
class Stages:
    """How the blocks are spread.

    Attributes:
        sizes: Blocks of each stage.
        costs: Cost of each block, with what stands beside it.
        memory: Bytes of each block's parameters, likewise.
    """

    sizes: list[int]
    costs: list[float]
    memory: list[int]


def choose_stages(options: dict[str, Any], module: nn.Module, blocks: Sequence[str], num_stages: int) -> Stages:
    """Spread the blocks over the stages as the keywords ask.

    Raises:
        ValueError: If there are fewer blocks than stages, the given lists do not fit, or no partition keeps to the
            memory of a stage.
    """
    costs, memory = options.get("block_costs"), block_bytes(module, blocks)
    if costs is not None and len(costs) != len(blocks):
        raise ValueError(
            f"block_costs has {len(costs)} numbers and the model {len(blocks)} blocks, {blocks[0]} to {blocks[-1]}: "
            "one number a block. lightning_hybrid.measure_costs(module, batch) makes the list, with the same "
            "pipeline_layers."
        )
    costs = estimated_costs(module, blocks) if costs is None else [float(cost) for cost in costs]
    wanted = options["partition"]
    if wanted == "uniform":
        sizes = partition.uniform(len(blocks), num_stages)
    elif wanted == "balanced":
        sizes = partition.balanced(costs, num_stages, memory=memory, max_memory=options.get("max_stage_memory"))
    else:
        sizes = [int(size) for size in wanted]
        partition.check(sizes, len(blocks), num_stages)
    return Stages(sizes, costs, memory)


def stage_table(stages: Stages, blocks: Sequence[str], layout: Layout, *, estimated: bool) -> str:
    """A row for each stage with the world ranks that hold it, and how far the slowest is from an ideal one."""
    layers = partition.stage_layers(stages.sizes)
    costs = [sum(stages.costs[i] for i in of_stage) for of_stage in layers]
    total = sum(costs) or 1.0
    together = layout.data * layout.tensor
    rows = [("stage", "rank" if together == 1 else "ranks", "blocks", "cost", "parameters")]
    for stage, (of_stage, cost) in enumerate(zip(layers, costs, strict=True)):
        first, last = blocks[of_stage[0]], blocks[of_stage[-1]]
        memory = sum(stages.memory[i] for i in of_stage)
        named = f"{first} to {last}" if first != last else first
        rank = layout.rank(stage % layout.pipeline, 0)
        ranks = str(rank) if together == 1 else f"{rank}-{rank + together - 1}"
        rows.append((str(stage), ranks, named, f"{cost / total:.1%}", _readable(memory)))
    of_ranks, width = (max(len(row[column]) for row in rows) for column in (1, 2))
    lines = [f"{a:>5}  {b:>{of_ranks}}  {named:<{width}}  {c:>6}  {d:>10}" for a, b, named, c, d in rows]
    kind = "estimated by numbers of parameters" if estimated else "as given in block_costs"
    slowest = max(range(len(costs)), key=costs.__getitem__)
    ratio = costs[slowest] * len(costs) / total
    lines.append(f"slowest: stage {slowest}, {ratio:.2f} times an equal share (costs {kind})")
    if layout.tensor > 1:
        lines.append(f"parameters are those of whole stages, before {layout.tensor} ranks split them")
    return "\n".join(lines)


def _readable(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{round(size, 1):g} {unit}"
        size /= 1024
    return f"{round(size, 1):g} GiB"
