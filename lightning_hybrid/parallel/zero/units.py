"""Chooses the modules whose parameters are gathered and whose gradients are summed together: the blocks, and a few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lightning_hybrid.parallel.pipeline.cut import StageCut, ancestors_of, outside_modules

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # nobody calls them
ONLY_STAGE = 0
GROUP_BYTES = 2**20
"""Most of several blocks in a unit: fewer messages saved time up to here in stages 2 and 3; then less overlaps."""
GROUP_SHARE = 4
"""Such a unit is at most one of so many parts of a stage's blocks: stage 3 is not to gather a small model whole."""


@dataclass(frozen=True)
class Unit:
    """Modules with parameters of their own.

    Attributes:
        names: Dotted names; several of small blocks in their order.
        stages: Stages of this rank whose runs call them, ascending.
        is_block: They are blocks; else one module beside or within them.
        is_experts: It is a layer's experts, which fewer ranks have the same of.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]
    is_block: bool = True
    is_experts: bool = False


def choose_units(
    root: nn.Module,
    cut: StageCut | None,
    blocks: Sequence[str],
    *,
    zero_stage: int,
    callers: Mapping[str, Collection[int]] | None = None,
    excluded: Collection[str] = (),
    group: bool = True,
    banks: Collection[str] = (),
) -> list[Unit]:
    """The units of one rank, blocks first and in order; all that is in none of them travels in buckets.

    Stage 1 without a pipeline has buckets alone: gathered and summed in one order, whatever the replicas compute. In
    stage 3 a module beside the blocks with at least half as many parameters as the smallest block is a unit too;
    smaller ones would only make more messages. For the same reason neighbours that are small are one unit.

    Args:
        root: The model.
        cut: This rank's view of it; None without a pipeline.
        blocks: Names of all blocks.
        zero_stage: 1, 2 or 3.
        callers: Of each module beside the blocks, the stages that call it; unused without a pipeline.
        excluded: Modules whose parameters are read past their calls.
        group: Several small blocks may be one unit.
        banks: Experts that are split over the data axis. Those in a unit are one of their own, before it.

    Raises:
        ValueError: If such experts are read past their calls.
    """
    if zero_stage == 1 and cut is None:
        return []
    users = Counter(id(p) for module in root.modules() for p in module.parameters(recurse=False))
    users += _in_shared_modules(root, blocks)

    def is_whole(name: str) -> bool:
        """Whether it has parameters, and shares none: what others hold too must be in no unit."""
        parameters = list(root.get_submodule(name).parameters())
        return name not in excluded and bool(parameters) and all(users[id(p)] == 1 for p in parameters)

    if cut is None:
        stages = {ONLY_STAGE: list(blocks)}
    else:
        stages = {stage: [cut.blocks[i] for i in cut.blocks_of_stage(stage)] for stage in cut.stages}
    stages = {stage: [name for name in names if is_whole(name)] for stage, names in stages.items()}
    units = [
        Unit(together, (stage,))
        for stage, names in stages.items()
        for together in (_groups(root, names) if group else [(name,) for name in names])
    ]
    if zero_stage < 3 or not units:
        return [*_units_of_experts(units, banks, is_whole), *units]
    least = min(_size(root, name) for unit in units for name in unit.names) / 2
    taken = set[int]()  # a module may have a second name, or be within another one
    for name in outside_modules(root, ancestors_of(blocks), set(blocks)):
        calling = [ONLY_STAGE] if cut is None else [s for s in (callers or {}).get(name, ()) if s in cut.stages]
        inside = {id(parameter) for parameter in root.get_submodule(name).parameters()}
        is_called = not isinstance(root.get_submodule(name), CONTAINERS)
        if calling and is_called and is_whole(name) and not taken & inside and _size(root, name) >= least:
            units.append(Unit((name,), tuple(calling), is_block=False))
            taken |= inside
    return [*_units_of_experts(units, banks, is_whole), *units]


def _units_of_experts(units: Sequence[Unit], banks: Collection[str], is_whole: Callable[[str], bool]) -> list[Unit]:
    """Those within units: `fully_shard` finds no others there later.

    Raises:
        ValueError: If some are read past their calls.
    """
    found = [
        Unit((bank,), unit.stages, is_block=False, is_experts=True)
        for unit in units
        for bank in banks
        if any(bank.startswith(f"{name}.") for name in unit.names)
    ]
    for bank in (name for unit in found for name in unit.names):
        if not is_whole(bank):
            raise ValueError(
                f"The parameters of {bank} are shared, or read in a step by other code than the module itself, and "
                "experts that are split over replicas are whole only while it runs. Set zero_stage=0, or "
                "expert_parallel_size=1."
            )
    return found


def _groups(root: nn.Module, blocks: Sequence[str]) -> list[tuple[str, ...]]:
    """Part the blocks of a stage into runs of neighbours that together are small, and blocks that are not."""
    sizes = {name: _num_bytes(root, name) for name in blocks}
    most = min(GROUP_BYTES, sum(sizes.values()) // GROUP_SHARE)
    groups: list[list[str]] = []
    left = -1
    for name, size in sizes.items():
        left -= size
        if left < 0:
            groups.append([])
            left = most - size
        groups[-1].append(name)
    return [tuple(group) for group in groups]


def _num_bytes(root: nn.Module, name: str) -> int:
    return sum(p.numel() * p.element_size() for p in root.get_submodule(name).parameters())


def _in_shared_modules(root: nn.Module, blocks: Sequence[str]) -> Counter[int]:
    """Identities of parameters in modules that are in several blocks, or in a block and beside the blocks."""
    of_blocks = {root.get_submodule(name) for name in blocks}
    beside = {root.get_submodule(name) for name in outside_modules(root, ancestors_of(blocks), set(blocks))}
    beside = {module for module in beside if of_blocks.isdisjoint(module.modules())}
    numbers = Counter(module for block in of_blocks for module in block.modules())
    numbers.update({inner for module in beside for inner in module.modules()})
    return Counter(id(p) for module, number in numbers.items() if number > 1 for p in module.parameters(recurse=False))


def loose_parameters(root: nn.Module, main: torch.dtype | None = None) -> dict[str, nn.Parameter]:
    """What `fully_shard` cannot slice, or not together with the rest: scalars, no elements, odd strides, a second type.

    Args:
        root: The model.
        main: The first type; None takes the one that most numbers have.
    """
    sizes: dict[torch.dtype, int] = {}
    for parameter in root.parameters():
        if _may_train(parameter):
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    main = main or max(sizes, key=sizes.__getitem__, default=None)
    return {
        name: p
        for name, p in root.named_parameters()
        if p.ndim == 0 or p.numel() == 0 or not p.is_contiguous() or (_may_train(p) and p.dtype != main)
    }


def _may_train(parameter: nn.Parameter) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def _size(root: nn.Module, name: str) -> int:
    return sum(parameter.numel() for parameter in root.get_submodule(name).parameters())
