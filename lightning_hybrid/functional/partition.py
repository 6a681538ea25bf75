"""Which layers make which stage: a partition is the list of layers per stage, in the model's order."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise


def uniform(num_layers: int, num_stages: int) -> list[int]:
    """Give every stage the same number of layers, the first stages one more where that does not divide.

    Args:
        num_layers: Layers of the model, at least ``num_stages``.
        num_stages: Stages, that is pipeline ranks times chunks, at least 1.

    Returns:
        Layers of each stage.

    Raises:
        ValueError: If there are fewer layers than stages, or no stage.
    """
    _check_sizes(num_layers, num_stages)
    return [num_layers // num_stages + (stage < num_layers % num_stages) for stage in range(num_stages)]


def balanced(
    costs: Sequence[float],
    num_stages: int,
    first_cost: float = 0,
    last_cost: float = 0,
    *,
    memory: Sequence[int] | None = None,
    max_memory: int | None = None,
) -> list[int]:
    """Split layers so that the slowest stage is as fast as it can be, exactly, whatever their costs.

    Args:
        costs: Cost of each layer, in any one unit, not negative.
        num_stages: Stages, that is pipeline ranks times chunks, at least 1 and at most one a layer.
        first_cost: Cost of what stands before the first layer (embeddings), in the same unit.
        last_cost: Cost of what stands behind the last layer (norm, head, loss), in the same unit.
        memory: Bytes of each layer, what stands before the first and behind the last included; for ``max_memory``.
        max_memory: Most bytes of a stage; None: any number.

    Returns:
        Layers of each stage. Among partitions with the same slowest stage: the smallest sum of squared stage costs,
        then the smallest sum of squared numbers of layers, then the most layers in early stages, as :func:`uniform`.

    Raises:
        ValueError: If there are fewer layers than stages, no stage, a cost is negative or not finite, ``memory`` has
            another length than ``costs``, or no partition keeps to ``max_memory``.

    Source: the linear partition problem; minimising the slowest stage is the aim of Harlap et al. 2018,
    arXiv:1806.03377, section 3.2, here without replicated stages and communication.
    """
    _check_sizes(len(costs), num_stages)
    prefix = _prefix_sums(costs, first_cost, last_cost)
    everywhere = [len(costs)] * len(costs)
    reach = everywhere if max_memory is None else _reach(memory or (), everywhere, num_stages, max_memory)
    limit = _slowest(prefix, num_stages, reach)
    return _most_even(prefix, num_stages, limit, reach)


def check(partition: Sequence[int], num_layers: int, num_stages: int) -> None:
    """Refuse a partition, written by hand, that does not fit the model.

    Args:
        partition: Layers of each stage.
        num_layers: Layers of the model.
        num_stages: Stages, that is pipeline ranks times chunks.

    Raises:
        ValueError: If the number of stages or the sum is wrong, or a stage has no layer.
    """
    _check_sizes(num_layers, num_stages)
    if len(partition) != num_stages or sum(partition) != num_layers or min(partition) < 1:
        raise ValueError(
            f"partition={list(partition)} has {len(partition)} stages with {sum(partition)} layers; needed are "
            f"{num_stages} stages of at least one layer with {num_layers} layers in all, such as "
            f"{uniform(num_layers, num_stages)}. Change the list, or use 'balanced' or 'uniform'."
        )


def runs(lists: Sequence[Sequence[str]], partition: Sequence[int]) -> list[list[str]]:
    """Groups of consecutive layers of one list that are on one stage.

    Args:
        lists: Names of the layers of each list; together they are the model's layers in order.
        partition: Layers of each stage; empty if one stage has all.
    """
    cuts = set(accumulate(partition))
    groups: list[list[str]] = []
    position = 0
    for layers in lists:
        for index, layer in enumerate(layers):
            if index == 0 or position in cuts:
                groups.append([])
            groups[-1].append(layer)
            position += 1
    return groups


def stage_layers(partition: Sequence[int]) -> list[range]:
    """Give the layers of each stage, numbered from 0: ``[2, 3]`` has ``[range(0, 2), range(2, 5)]``."""
    return [range(start, end) for start, end in pairwise(accumulate(partition, initial=0))]


def layers_of_rank(partition: Sequence[int], p: int, rank: int) -> list[int]:
    """List the layers that a pipeline rank holds in all its chunks.

    Args:
        partition: Layers of each stage; stage ``s`` lives on rank ``s % p``.
        p: Pipeline ranks; divides the number of stages.
        rank: Pipeline rank, from 0.

    Returns:
        Numbers of the layers, from 0, ascending: 16 layers on 4 ranks with 2 chunks give rank 0 ``[0, 1, 8, 9]``.

    Raises:
        ValueError: If the stages cannot be dealt to ``p`` ranks in equal numbers, or there is no such rank.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2.
    """
    if p < 1 or len(partition) % p or not 0 <= rank < p:
        raise ValueError(
            f"{len(partition)} stages on {p} ranks: the number of stages must be a multiple of the number of ranks, "
            f"and rank={rank} must be from 0 to {p - 1}."
        )
    return [layer for layers in stage_layers(partition)[rank::p] for layer in layers]


def _check_sizes(num_layers: int, num_stages: int) -> None:
    if num_stages < 1:
        raise ValueError(f"num_stages={num_stages}: a pipeline has at least one stage.")
    if num_layers < num_stages:
        raise ValueError(
            f"{num_layers} layers cannot fill {num_stages} stages, which need one each. Use a pipeline size times "
            f"number of chunks of at most {num_layers}, or a model with {num_stages} layers or more."
        )


def _prefix_sums(costs: Sequence[float], first_cost: float, last_cost: float) -> list[int]:
    """Sum costs as integers in one common unit: with rounding, equal layers at different places would not tie."""
    values = [*costs, first_cost, last_cost]
    wrong = [cost for cost in values if not (math.isfinite(cost) and cost >= 0)]
    if wrong:
        raise ValueError(f"costs must be finite and not negative, got {wrong}. Check how they were measured.")
    exact = [Fraction(cost) for cost in values]
    unit = math.lcm(*(cost.denominator for cost in exact))
    *layers, first, last = (int(cost * unit) for cost in exact)
    layers[0] += first
    layers[-1] += last
    return list(accumulate(layers, initial=0))


def _reach(memory: Sequence[int], everywhere: list[int], num_stages: int, max_memory: int) -> list[int]:
    """For each layer, where a stage that begins with it must end at the latest."""
    if len(memory) != len(everywhere):
        raise ValueError(f"max_memory={max_memory} needs the bytes of {len(everywhere)} layers, got {len(memory)}.")
    prefix = list(accumulate(memory, initial=0))
    least = _slowest(prefix, num_stages, everywhere)
    if least > max_memory:
        raise ValueError(
            f"max_stage_memory={max_memory}: no partition of {len(memory)} blocks into {num_stages} stages keeps to "
            f"it. At best the largest stage has {least} bytes of parameters, and the largest block (with what stands "
            f"beside it) has {max(memory)}. Allow {least} or more, or use more stages."
        )
    return [bisect_right(prefix, before + max_memory) - 1 for before in prefix[:-1]]


def _slowest(prefix: list[int], num_stages: int, reach: list[int]) -> int:
    """Give the least possible cost of the slowest stage: smallest limit under which greedy filling needs few stages."""
    low, high = max(end - start for start, end in pairwise(prefix)), prefix[-1]
    while low < high:
        middle = (low + high) // 2
        if _stages_needed(prefix, middle, reach) <= num_stages:
            high = middle
        else:
            low = middle + 1
    return low


def _stages_needed(prefix: list[int], limit: int, reach: list[int]) -> int:
    stages, start = 1, 0
    for before, end in pairwise(range(len(prefix))):
        if prefix[end] - prefix[start] > limit or end > reach[start]:
            stages, start = stages + 1, before
    return stages


def _most_even(prefix: list[int], num_stages: int, limit: int, reach: list[int]) -> list[int]:
    """Minimise the sum of squares under the limits, by dynamic programming over suffixes, last stage first."""
    num_layers = len(prefix) - 1
    best: dict[int, tuple[int, int, list[int]]] = {num_layers: (0, 0, [])}
    for later_stages in range(num_stages):
        longer: dict[int, tuple[int, int, list[int]]] = {}
        for start in range(num_layers - later_stages - 1, -1, -1):
            for end in range(min(num_layers - later_stages, reach[start]), start, -1):  # a tie keeps the longest
                cost = prefix[end] - prefix[start]
                if cost > limit or end not in best:
                    continue
                squares, sizes, tail = best[end]
                value = (squares + cost**2, sizes + (end - start) ** 2)
                if start not in longer or value < longer[start][:2]:
                    longer[start] = (*value, [end - start, *tail])
        best = longer
    return best[0][2]
