"""The idle part of a pipeline's steps, from simulated or measured times of their actions."""

from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean

from lightning_hybrid.functional.lowering import COMPUTE, depends_on, lower
from lightning_hybrid.functional.schedules import Action, Kind
from lightning_hybrid.functional.simulation import Event, simulate

Events = Iterable[tuple[int, Action, float, float]]


def pipeline_times(events: Events) -> tuple[float, float]:
    """Computing time, and time in which ranks could have computed.

    A step lasts from the start of its first compute action to the end of its last one, on whichever ranks. What comes
    before and after, such as sums of gradients that are waited for, is no part of it; sums that run beside a backward
    pass lengthen that pass at most.

    Args:
        events: ``(pipeline rank, action, start, end)`` of one step on all ranks of a pipeline, in any unit. Transfers
            are left out.

    Returns:
        The sum of all compute actions' times, and the number of ranks times the step's time. One rank never waits for
        another: both are then its computing time. 0 and 0 without actions.

    Raises:
        ValueError: If an action starts before its input is there: the ranks' clocks differ.
    """
    compute = [(rank, action, start, end) for rank, action, start, end in events if action.kind in COMPUTE]
    busy = sum(end - start for _, _, start, end in compute)
    num_ranks = len({rank for rank, *_ in compute})
    if num_ranks < 2:
        return busy, busy
    _refuse_other_clocks(compute)
    first, last = min(start for _, _, start, _ in compute), max(end for *_, end in compute)
    return busy, num_ranks * (last - first)


def bubble_share(busy: float, total: float) -> float:
    """Idle over total time, ``(p - 1) / (m + p - 1)`` for GPipe with equal times; 0 where there is no time at all.

    Source: Huang et al. 2019, arXiv:1811.06965, section 2.3.
    """
    return (total - busy) / total if total else 0.0


def bubble_ratio(busy: float, total: float) -> float:
    """Idle over computing time, ``(p - 1) / m`` for GPipe with equal times; 0 where there is no time at all.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
    """
    return (total - busy) / busy if busy else 0.0


def scheduled(events: Events) -> list[Event]:
    """Simulate the step that events tell of, with each stage's mean times and free transfers.

    Its bubble is what the order of the actions and the differences between stages leave idle; what a measured bubble
    has more is spent on transfers, and on times that vary.

    Args:
        events: As in :func:`pipeline_times`.

    Returns:
        The simulated events, in the same unit; none if there are none.
    """
    orders: dict[int, list[tuple[float, Action]]] = defaultdict(list)
    times: dict[Kind, dict[int, list[float]]] = {kind: defaultdict(list) for kind in COMPUTE}
    for rank, action, start, end in events:
        if action.kind in COMPUTE:
            orders[rank].append((start, action))
            times[action.kind][action.stage].append(end - start)
    if not orders:
        return []
    stages = range(1 + max(times[Kind.FORWARD]))
    schedule = [[action for _, action in sorted(orders[rank], key=lambda pair: pair[0])] for rank in sorted(orders)]
    forward, backward = ([fmean(times[kind].get(stage, [0.0])) for stage in stages] for kind in COMPUTE)
    return simulate(lower(schedule, len(stages)), forward_time=forward, backward_time=backward).events


def _refuse_other_clocks(compute: list[tuple[int, Action, float, float]]) -> None:
    num_stages = 1 + max(action.stage for _, action, _, _ in compute)
    ends = {action: (rank, end) for rank, action, _, end in compute}
    for rank, action, start, _ in compute:
        for needed in depends_on(action, num_stages):
            other, end = ends.get(needed, (rank, start))
            if start < end:
                raise ValueError(
                    f"{action} starts at {start} on pipeline rank {rank}, and its input {needed} ends at {end} on rank "
                    f"{other}: their clocks differ, as those of several machines do. Measure a pipeline whose ranks "
                    "are on one machine, or predict its bubble with lightning-hybrid schedule."
                )
