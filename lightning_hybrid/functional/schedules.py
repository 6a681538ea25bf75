"""Pipeline schedules as plain lists of actions: who computes what, in which order.

A schedule has one list a pipeline rank. Stages have global numbers: chunk ``c`` of rank ``r`` out of ``p`` is stage
``c * p + r``, so that stage ``s`` lives on rank ``s % p``. Communication is added by ``lowering.lower``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What an action does; communication kinds appear in lowered programs only."""

    FORWARD = "forward"
    BACKWARD = "backward"
    SEND_FORWARD = "send_forward"
    RECV_FORWARD = "recv_forward"
    SEND_BACKWARD = "send_backward"
    RECV_BACKWARD = "recv_backward"


@dataclass(frozen=True, slots=True)
class Action:
    """One unit of work of one rank.

    Args:
        kind: What to do.
        stage: Global number of the stage that does it, from 0. A ``RECV_FORWARD`` of stage 3 takes what the
            ``SEND_FORWARD`` of stage 2 gave.
        micro_batch: Number of the micro-batch in its step, from 0.
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        """Name the action for messages, such as ``FORWARD(stage 1, micro-batch 3)``."""
        return f"{self.kind.name}(stage {self.stage}, micro-batch {self.micro_batch})"


Schedule = list[list[Action]]
"""Actions in the order in which each rank runs them: ``schedule[rank][i]``."""


def gpipe(p: int, m: int, v: int = 1) -> Schedule:
    """All forwards, then all backwards; with chunks, one chunk after the other.

    Args:
        p: Pipeline ranks, at least 1.
        m: Micro-batches a step, at least 1.
        v: Chunks a rank, at least 1.

    Returns:
        Compute actions of each of the ``p`` ranks. Each rank holds up to ``m * v`` micro-batches in flight.

    Raises:
        ValueError: If a size is below 1.

    Source: Huang et al. 2019, arXiv:1811.06965, section 2.3, figure 2c; with ``v > 1`` it is the breadth-first order of
    Lamy-Poirier 2022, arXiv:2211.05953, with backwards in ascending order of micro-batches.
    """
    _check_sizes(p, m, v)
    backwards = [
        [Action(Kind.BACKWARD, chunk * p + rank, i) for chunk in reversed(range(v)) for i in range(m)]
        for rank in range(p)
    ]
    return [forward + backward for forward, backward in zip(forward_only(p, m, v), backwards, strict=True)]


def forward_only(p: int, m: int, v: int = 1) -> Schedule:
    """The forward half of :func:`gpipe`, for validation, test and predict.

    Args:
        p: Pipeline ranks, at least 1.
        m: Micro-batches a step, at least 1.
        v: Chunks a rank, at least 1.

    Returns:
        Forward actions of each of the ``p`` ranks.

    Raises:
        ValueError: If a size is below 1.
    """
    _check_sizes(p, m, v)
    return [[Action(Kind.FORWARD, chunk * p + rank, i) for chunk in range(v) for i in range(m)] for rank in range(p)]


def one_forward_one_backward(p: int, m: int) -> Schedule:
    """Warm up with ``min(p - 1 - rank, m)`` forwards, then alternate, then drain.

    Args:
        p: Pipeline ranks, at least 1.
        m: Micro-batches a step, at least 1.

    Returns:
        Compute actions of each of the ``p`` ranks. Rank ``r`` holds up to ``min(p - r, m)`` micro-batches in flight.

    Raises:
        ValueError: If a size is below 1.

    Source: "PipeDream-flush" of Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1, figure 3.
    """
    _check_sizes(p, m, 1)
    return [
        _alternate(
            forwards=[Action(Kind.FORWARD, rank, i) for i in range(m)],
            backwards=[Action(Kind.BACKWARD, rank, i) for i in range(m)],
            warm_up=min(p - 1 - rank, m),
        )
        for rank in range(p)
    ]


def interleaved_1f1b(p: int, m: int, v: int) -> Schedule:
    """1F1B over ``v`` chunks a rank: rounds of ``p`` micro-batches walk through the chunks.

    Args:
        p: Pipeline ranks, at least 1.
        m: Micro-batches a step, a multiple of ``p``.
        v: Chunks a rank, at least 1.

    Returns:
        Compute actions of each of the ``p`` ranks. Rank ``r`` holds up to ``min(2 * (p - r - 1) + (v - 1) * p + 1,
        m * v)`` micro-batches of a chunk in flight; with ``v = 1`` that is more than 1F1B needs.

    Raises:
        ValueError: If a size is below 1, or ``m`` is not a multiple of ``p``.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2, figure 4; warm-up as in Megatron-LM.
    """
    _check_sizes(p, m, v)
    if m % p:
        raise ValueError(
            f"interleaved 1F1B needs a number of micro-batches that is a multiple of the pipeline size, got m={m} and "
            f"p={p}. Use {max(m - m % p, p)} micro-batches, or choose(), which falls back to GPipe's order."
        )
    order = [(chunk, i) for first in range(0, m, p) for chunk in range(v) for i in range(first, first + p)]
    return [
        _alternate(
            forwards=[Action(Kind.FORWARD, chunk * p + rank, i) for chunk, i in order],
            backwards=[Action(Kind.BACKWARD, (v - 1 - chunk) * p + rank, i) for chunk, i in order],
            warm_up=min(2 * (p - rank - 1) + (v - 1) * p, m * v),
        )
        for rank in range(p)
    ]


def choose(name: str, p: int, m: int, v: int = 1) -> Schedule:
    """Make the schedule that a user asked for by name, for any number of micro-batches.

    Args:
        name: "gpipe", "1f1b", "interleaved_1f1b", or "auto", which is "1f1b" for one chunk and "interleaved_1f1b"
            for more. With one chunk "interleaved_1f1b" is plain 1F1B, which needs less memory.
        p: Pipeline ranks, at least 1.
        m: Micro-batches a step, at least 1. With chunks, a number that is not a multiple of ``p`` runs in GPipe's
            order, which costs memory but neither exactness nor a hang.
        v: Chunks a rank, at least 1.

    Returns:
        Compute actions of each of the ``p`` ranks.

    Raises:
        ValueError: If a size is below 1, the name is unknown, or "1f1b" is asked for with several chunks.
    """
    make = _resolve(name, v)
    if make is gpipe or (v > 1 and m % max(p, 1)):
        return gpipe(p, m, v)
    return one_forward_one_backward(p, m) if v == 1 else interleaved_1f1b(p, m, v)


def usable_microbatches(name: str, p: int, v: int, wanted: int, batch_size: int) -> int:
    """Give the number of micro-batches to run when a batch may be smaller than was planned.

    Args:
        name: Schedule, as for :func:`choose`.
        p: Pipeline ranks, at least 1.
        v: Chunks a rank, at least 1.
        wanted: Micro-batches that the user asked for, at least 1.
        batch_size: Samples in this batch, at least 1; a micro-batch has one sample or more.

    Returns:
        At most ``min(wanted, batch_size)``: for an interleaved schedule the largest multiple of ``p`` that fits; where
        none fits, or for another schedule, that minimum itself.

    Raises:
        ValueError: If a size is below 1, or :func:`choose` would refuse the name.
    """
    _check_sizes(p, wanted, v)
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: a micro-batch needs a sample. Drop empty batches.")
    fits = min(wanted, batch_size)
    if _resolve(name, v) is not interleaved_1f1b or fits < p:
        return fits
    return fits - fits % p


def _resolve(name: str, v: int) -> Callable[..., Schedule]:
    makers: dict[str, Callable[..., Schedule]] = {
        "auto": interleaved_1f1b if v > 1 else one_forward_one_backward,
        "gpipe": gpipe,
        "1f1b": one_forward_one_backward,
        "interleaved_1f1b": interleaved_1f1b if v > 1 else one_forward_one_backward,
    }
    if name not in makers:
        raise ValueError(f"unknown schedule {name!r}. Use one of {', '.join(map(repr, makers))}.")
    if name == "1f1b" and v > 1:
        raise ValueError(
            f"schedule '1f1b' runs one chunk a rank, got {v}. Use 'interleaved_1f1b' or 'gpipe', or one chunk."
        )
    return makers[name]


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    steady = len(forwards) - warm_up
    pairs = [action for pair in zip(forwards[warm_up:], backwards[:steady], strict=True) for action in pair]
    return forwards[:warm_up] + pairs + backwards[steady:]


def _check_sizes(p: int, m: int, v: int) -> None:
    for size, what in ((p, "pipeline ranks"), (m, "micro-batches"), (v, "chunks a rank")):
        if size < 1:
            raise ValueError(f"the number of {what} is {size}. Use 1 or more.")
