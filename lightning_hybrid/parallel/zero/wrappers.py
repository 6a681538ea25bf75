"""Modules and hooks that stand between a model and `fully_shard`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_hybrid.compat import before_backward, is_view
from lightning_hybrid.functional.trees import leaves_of, map_leaves
from lightning_hybrid.parallel.gradients import make_buckets
from lightning_hybrid.parallel.mesh import Mesh
from lightning_hybrid.parallel.pipeline.run import Result
from lightning_hybrid.parallel.zero.summing import sum_by_exchange
from lightning_hybrid.parallel.zero.units import Unit


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


def sharding_functions(
    mesh: Mesh, *, zero_stage: int, dtypes: tuple[torch.dtype | None, torch.dtype | None], offload: bool, experts: bool
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`fully_shard` over the data axis, and over the ranks that have the same experts.

    Args:
        mesh: Groups of this rank.
        zero_stage: 1, 2 or 3.
        dtypes: In which modules show parameters, and in which gradients are summed; None leaves them.
        offload: Slices and their gradients live in host memory.
        experts: Experts are split.
    """
    shard = partial(
        fully_shard,
        reshard_after_forward=zero_stage == 3,
        mp_policy=MixedPrecisionPolicy(*dtypes, cast_forward_inputs=False),
        offload_policy=CPUOffloadPolicy(pin_memory=mesh.device.type != "cpu") if offload else OffloadPolicy(),
    )
    dense: Any = partial(shard, mesh=mesh.dense.device_mesh())
    return dense, partial(shard, mesh=mesh.experts.device_mesh()) if experts else dense


def shard_all(
    root: nn.Module,
    units: Sequence[Unit],
    loose: Mapping[str, nn.Parameter],
    experts: Collection[str],
    shard: Callable[..., Any],
    shard_experts: Callable[..., Any],
    *,
    for_moments: bool,
) -> tuple[list[tuple[Unit, Any]], list[Any], Any]:
    """Shard units, and all else in buckets: parameters of experts over the ranks that have the same ones.

    Args:
        root: The model.
        units: What is gathered together.
        loose: What is not sharded.
        experts: Names of parameters of experts that are split over ranks.
        shard: `fully_shard`, with its keywords.
        shard_experts: The same for these.
        for_moments: Parameters of units are whole only while a forward or backward pass of the modules runs.

    Returns:
        The units, each with a module that stands for all of it, the buckets, and what runs a step.
    """
    split = {p for name, p in root.named_parameters() if name in experts and name not in loose}
    sharded, buckets = list[tuple[Unit, Any]](), list[Any]()
    for unit in units:
        modules = [root.get_submodule(name) for name in unit.names]
        others = set(loose.values()) | (set() if unit.is_experts else split)
        over = partial(shard_experts if unit.is_experts else shard, ignored_params=others)
        shard_unit(modules, over, for_moments=for_moments)
        sharded.append((unit, modules[0]))
    rest = [p for name, p in root.named_parameters() if not isinstance(p, DTensor) and name not in loose]
    dense, mine = [p for p in rest if p not in split], [p for p in rest if p in split]
    for function, parameters in ((shard, dense), (shard_experts, mine)):
        for bucket in make_buckets(parameters):
            buckets.append(function(Bucket(root), ignored_params=set(root.parameters()) - set(bucket)))
    missed = [n for n, p in root.named_parameters() if not isinstance(p, DTensor) and n not in loose]
    assert not missed, f"{missed} are in no unit and no bucket"
    return sharded, buckets, shard(Step(root, buckets), ignored_params=set(root.parameters()))


def shard_unit(modules: Sequence[nn.Module], shard: Callable[[Any], Any], *, for_moments: bool) -> None:
    """Let modules be gathered and summed together.

    Args:
        modules: One or more.
        shard: `fully_shard`, with its keywords.
        for_moments: Parameters are whole only while a forward or backward pass of the modules runs.
    """
    if for_moments:
        for module in modules:
            module.register_forward_hook(own_memory)
    shard(modules if len(modules) > 1 else modules[0])
    if for_moments and len(modules) > 1:
        for module in modules:
            module.register_forward_hook(gather_early)


def gather_early(module: nn.Module, args: Any, output: Any) -> None:
    """Let parameters be whole before the backward pass of each module that `fully_shard` got together with others.

    It gathers before the last one's: but the last one's output may have no gradient.
    """
    if torch.is_grad_enabled():
        for leaf in leaves_of(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(before_backward(module))


def own_memory(module: nn.Module, args: Any, output: Any) -> Any:
    """Outputs that are no views: `fully_shard` loses sight of a view that is written to, and gathers too late."""

    def own(leaf: Any) -> Any:
        is_seen = isinstance(leaf, Tensor) and leaf.requires_grad and is_view(leaf)
        return leaf.clone() if is_seen else leaf

    return map_leaves(own, output)


def configure(
    units: Sequence[tuple[Unit, Any]], buckets: Sequence[FSDPModule], *, zero_stage: int, fills: bool, on_host: bool
) -> None:
    """Sums are sums; a block fetches its neighbour on the same stage ahead, and nothing else does.

    By default a module gathers what ran before it, and that differs between replicas if only one of them has probed
    a new shape. Where parameters stay whole until the last backward pass, that has nothing to fetch.

    Args:
        units: In the model's order, with their modules.
        buckets: All else that is gathered together.
        zero_stage: 1, 2 or 3.
        fills: `fully_shard` can take zeros for gradients that are not there.
        on_host: They are summed in host memory.
    """
    for module in [*(module for _, module in units), *buckets]:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if on_host:
            sum_by_exchange(module)
        if fills:  # since torch 2.13
            module.set_reduce_scatter_unused_params(True)
        module.set_modules_to_backward_prefetch([module])  # none but itself, which is gathered
    blocks = [(unit.stages, module) for unit, module in units if unit.is_block]
    for (stages, module), (next_stages, following) in pairwise(blocks):
        if stages == next_stages:
            module.set_modules_to_forward_prefetch([following])
        if zero_stage == 3 and stages == next_stages:
            following.set_modules_to_backward_prefetch([module])
