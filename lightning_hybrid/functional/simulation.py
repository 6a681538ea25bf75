"""Exact timing of pipeline programs, without processes: end, bubble, micro-batches in flight, deadlocks.

Compute actions of a rank run one after the other, transfers run beside them. Times are what the caller gives; whole and
half numbers stay exact in floating point.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lightning_hybrid.functional.lowering import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Channel,
    channel_of,
    counterpart,
    depends_on,
    receive_of,
)
from lightning_hybrid.functional.schedules import Action, Kind, Schedule


class Event(NamedTuple):
    """One compute action, or one transfer under the name of its send, simulated or measured.

    Args:
        rank: Pipeline rank; of a transfer, the one that sends.
        action: What was done.
        start: When it began, in the unit of the given times (measured: seconds).
        end: When it ended, in the same unit.
    """

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What a simulated step looked like.

    Args:
        end_time: When the last action ended; the step begins at 0.
        busy: Time that each rank computed.
        peak_in_flight: Most micro-batches, counted once a chunk, whose forward each rank had done and whose backward it
            had not; 0 in a forward-only program, which keeps nothing.
        events: Compute actions and transfers, ordered by start.
    """

    end_time: float
    busy: list[float]
    peak_in_flight: list[int]
    events: list[Event]

    @property
    def bubble_share(self) -> float:
        """Idle time over total time, as GPipe counts it (arXiv:1811.06965)."""
        total = self.end_time * len(self.busy)
        return (total - sum(self.busy)) / total if total else 0.0

    @property
    def bubble_ratio(self) -> float:
        """Idle time over computing time, as PTD-P counts it (arXiv:2104.04473)."""
        idle = self.end_time * len(self.busy) - sum(self.busy)
        return idle / sum(self.busy) if any(self.busy) else 0.0


def simulate(
    programs: Schedule,
    *,
    forward_time: float | Sequence[float] = 1.0,
    backward_time: float | Sequence[float] = 2.0,
    transfer_time: float | Sequence[float] = 0.0,
    matching: Literal["ordered", "tagged"] = "ordered",
    rendezvous: bool = False,
) -> Simulation:
    """Run programs in simulated time.

    Args:
        programs: What :func:`~lightning_hybrid.functional.lowering.lower` gives, one a rank.
        forward_time: Time of a micro-batch's forward; one number, or one a stage, in any unit.
        backward_time: Time of its backward, likewise.
        transfer_time: Time of a payload, and of its gradient, between stage ``s`` and ``s + 1``; one number, or entry
            ``s`` of one a stage, the last of which is not used.
        matching: "ordered": the k-th send of a channel meets its k-th receive, one after the other, as in NCCL;
            "tagged": a message meets the receive with its name and passes others, as in gloo.
        rendezvous: True: a transfer starts when both ends are posted. False: sends are buffered and start at once.

    Returns:
        Times, bubble, micro-batches in flight and events.

    Raises:
        RuntimeError: If actions wait for ever, a message is never sent or taken, or, in order, meets a receive that
            means another one. The message names the actions.
        ValueError: If a time is negative, there is not one a stage, or the matching is unknown.
    """
    if matching not in ("ordered", "tagged"):
        raise ValueError(f"matching={matching!r} is unknown. Use 'ordered' or 'tagged'.")
    num_stages = 1 + max(action.stage for program in programs for action in program)
    times = {
        Kind.FORWARD: _per_stage(forward_time, num_stages, "forward_time"),
        Kind.BACKWARD: _per_stage(backward_time, num_stages, "backward_time"),
    }
    transfers = _per_stage(transfer_time, num_stages, "transfer_time")
    network = _Network(len(programs), transfers, in_order=matching == "ordered", rendezvous=rendezvous)
    ranks = [_Rank(rank, program, times, network, len(programs)) for rank, program in enumerate(programs)]
    done: dict[Action, float] = {}
    while any(rank.advance(done) for rank in ranks):
        pass
    _refuse_stuck(ranks, network)
    events = [*network.events, *(event for rank in ranks for event in rank.events)]
    return Simulation(
        end_time=max(event.end for event in events),
        busy=[sum(event.end - event.start for event in rank.events) for rank in ranks],
        peak_in_flight=[_peak(program) for program in programs],
        events=sorted(events, key=lambda event: (event.start, event.end, event.rank)),
    )


def theoretical_bubble_share(p: int, m: int, v: int = 1) -> float:
    """Give the idle share of total time, for stages of equal time and free transfers.

    Args:
        p: Pipeline ranks, at least 1.
        m: Micro-batches a step, at least 1.
        v: Chunks a rank, at least 1.

    Returns:
        ``(p - 1) / (v * m + p - 1)``, for GPipe, 1F1B and interleaved 1F1B alike. Only chunks with fewer micro-batches
        than ranks, where the papers say nothing and GPipe's order runs, differ: ``1 - v * m / (v * p + m - 1)``.

    Raises:
        ValueError: If a size is below 1.

    Source: Huang et al. 2019, arXiv:1811.06965, section 2.3; Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
    """
    slots = _slots(p, m, v)
    return (slots - v * m) / slots


def theoretical_bubble_ratio(p: int, m: int, v: int = 1) -> float:
    """Give idle over computing time, ``(p - 1) / (v * m)``; see :func:`theoretical_bubble_share`."""
    return (_slots(p, m, v) - v * m) / (v * m)


def _slots(p: int, m: int, v: int) -> int:
    """Count the chunk times of a step: ``v * m + p - 1``; with ``m < p``, each further chunk waits for the ring."""
    if min(p, m, v) < 1:
        raise ValueError(f"sizes must be at least 1, got p={p}, m={m}, v={v}.")
    return v * max(m, p) + min(m, p) - 1


class _Network:
    """Messages on their way: matches sends with posted receives, and knows when each arrives."""

    def __init__(self, p: int, transfer_times: Sequence[float], in_order: bool, rendezvous: bool) -> None:
        self.p, self.transfer_times = p, transfer_times
        self.in_order, self.rendezvous = in_order, rendezvous
        self.sent: dict[Channel, dict[Action, float]] = defaultdict(dict)
        self.posted: dict[Channel, dict[Action, float]] = defaultdict(dict)
        self.free: dict[Channel, float] = defaultdict(float)
        self.arrived: dict[Action, float] = {}
        self.events: list[Event] = []

    def post(self, action: Action, now: float) -> None:
        channel = channel_of(action, self.p)
        side = self.sent if action.kind in SENDS else self.posted
        side[channel][action] = now
        sent, posted = self.sent[channel], self.posted[channel]
        if self.in_order:
            while sent and posted:
                self._deliver(channel, next(iter(sent)), next(iter(posted)))
        elif action in sent and counterpart(action) in posted:
            self._deliver(channel, action, counterpart(action))
        elif action in posted and counterpart(action) in sent:
            self._deliver(channel, counterpart(action), action)

    def _deliver(self, channel: Channel, send: Action, receive: Action) -> None:
        if counterpart(send) != receive:
            raise RuntimeError(f"messages are matched in order, and {send} would be taken by {receive}.")
        start, posted = self.sent[channel].pop(send), self.posted[channel].pop(receive)
        if self.rendezvous:
            start = max(start, posted)
        if self.in_order:  # one message at a time
            start = max(start, self.free[channel])
        end = start + self.transfer_times[min(send.stage, receive.stage)]
        self.free[channel] = self.arrived[receive] = end
        self.events.append(Event(channel.source, send, start, end))

    def unmatched(self) -> list[Action]:
        return [action for side in (self.sent, self.posted) for queue in side.values() for action in queue]


class _Rank:
    """One rank's place in its program, and its clock."""

    def __init__(
        self, rank: int, program: list[Action], times: dict[Kind, list[float]], network: _Network, p: int
    ) -> None:
        self.rank, self.program, self.times, self.network, self.p = rank, program, times, network, p
        self.num_stages = len(times[Kind.FORWARD])
        self.next, self.clock = 0, 0.0
        self.events: list[Event] = []

    def advance(self, done: dict[Action, float]) -> bool:
        """Run until an action has to wait; say whether any ran."""
        first = self.next
        while self.next < len(self.program):
            action = self.program[self.next]
            if action.kind in COMPUTE:
                ready = self._ready(action, done)
                if ready is None:
                    break
                start = max(self.clock, ready)
                self.clock = done[action] = start + self.times[action.kind][action.stage]
                self.events.append(Event(self.rank, action, start, self.clock))
            else:
                self.network.post(action, self.clock)
            self.next += 1
        return self.next > first

    def _ready(self, action: Action, done: dict[Action, float]) -> float | None:
        """Say when an action's inputs are there; None as long as that is not known."""
        local = [done.get(a) for a in depends_on(action, self.num_stages) if a.stage % self.p == self.rank]
        receive = receive_of(action, self.p, self.num_stages)
        inputs = [*local, self.network.arrived.get(receive)] if receive else local
        known = [time for time in inputs if time is not None]
        return max(known, default=0.0) if len(known) == len(inputs) else None


def _refuse_stuck(ranks: list[_Rank], network: _Network) -> None:
    stuck = [f"rank {r.rank} at {r.program[r.next]}" for r in ranks if r.next < len(r.program)]
    if stuck:
        raise RuntimeError(f"deadlock: {', '.join(stuck)}.")
    lost = [f"{action} is never {'sent' if action.kind in RECEIVES else 'taken'}" for action in network.unmatched()]
    if lost:
        raise RuntimeError(f"messages without a counterpart: {', '.join(lost)}.")


def _peak(program: list[Action]) -> int:
    if not any(action.kind is Kind.BACKWARD for action in program):
        return 0
    peak = held = 0
    for action in program:
        held += (action.kind is Kind.FORWARD) - (action.kind is Kind.BACKWARD)
        peak = max(peak, held)
    return peak


def _per_stage(time: float | Sequence[float], num_stages: int, name: str) -> list[float]:
    times = [float(t) for t in time] if isinstance(time, Sequence) else [float(time)] * num_stages
    if len(times) != num_stages or not min(times) >= 0:
        raise ValueError(f"{name}={time} must be one time, or {num_stages} of them, one a stage, none negative.")
    return times
