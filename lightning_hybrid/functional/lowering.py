"""From a schedule to programs: adds the communication actions, and proves that a program cannot hang.

Every pair of ranks has up to four directed channels: forward or backward, between neighbours (straight) or between the
last and the first rank (wrap). Within one channel messages are matched in order, as NCCL does; between channels nothing
is assumed. A receive is only *posted* where it stands: the compute action that needs it waits for it. A send is never
waited for within the step, so its buffer must be kept.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from lightning_hybrid.functional.schedules import Action, Kind, Schedule

COMPUTE = (Kind.FORWARD, Kind.BACKWARD)
SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
RECEIVES = (Kind.RECV_FORWARD, Kind.RECV_BACKWARD)


@dataclass(frozen=True, slots=True)
class Channel:
    """A directed path between two ranks whose messages arrive in the order in which they were sent.

    Args:
        forward: True for payloads, False for their gradients.
        wrap: True between the last and the first rank, that is between two chunks.
        source: Pipeline rank that sends.
        target: Pipeline rank that receives.
    """

    forward: bool
    wrap: bool
    source: int
    target: int


def channel_of(action: Action, p: int) -> Channel:
    """Name the channel of a communication action among ``p`` ranks.

    Args:
        action: A send or a receive.
        p: Pipeline ranks, at least 2.

    Returns:
        The channel; the same for a send and for the receive that takes it.

    Raises:
        ValueError: If the action computes.
    """
    if action.kind in COMPUTE:
        raise ValueError(f"{action} computes and has no channel; pass a send or a receive.")
    forward = action.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
    upper = action.kind in (Kind.RECV_FORWARD, Kind.SEND_BACKWARD)  # the action's stage is the boundary's later one
    early, late = (action.stage - upper) % p, (action.stage - upper + 1) % p
    source, target = (early, late) if forward else (late, early)
    return Channel(forward, wrap=early == p - 1, source=source, target=target)


def counterpart(action: Action) -> Action:
    """Give the receive that takes a send, or the send that feeds a receive.

    Args:
        action: A send or a receive.

    Returns:
        The action at the other end, with that end's stage.

    Raises:
        ValueError: If the action computes.
    """
    others = {
        Kind.SEND_FORWARD: (Kind.RECV_FORWARD, 1),
        Kind.RECV_FORWARD: (Kind.SEND_FORWARD, -1),
        Kind.SEND_BACKWARD: (Kind.RECV_BACKWARD, -1),
        Kind.RECV_BACKWARD: (Kind.SEND_BACKWARD, 1),
    }
    if action.kind not in others:
        raise ValueError(f"{action} computes and has no counterpart; pass a send or a receive.")
    kind, step = others[action.kind]
    return Action(kind, action.stage + step, action.micro_batch)


def receive_of(action: Action, p: int, num_stages: int) -> Action | None:
    """Give the receive that a compute action needs; None where its input is on the same rank, or there is none."""
    if p == 1:
        return None
    if action.kind is Kind.FORWARD:
        return Action(Kind.RECV_FORWARD, action.stage, action.micro_batch) if action.stage > 0 else None
    return Action(Kind.RECV_BACKWARD, action.stage, action.micro_batch) if action.stage < num_stages - 1 else None


def send_of(action: Action, p: int, num_stages: int) -> Action | None:
    """Give the send that follows a compute action; None where its result stays on the same rank, or there is none."""
    if p == 1:
        return None
    if action.kind is Kind.FORWARD:
        return Action(Kind.SEND_FORWARD, action.stage, action.micro_batch) if action.stage < num_stages - 1 else None
    return Action(Kind.SEND_BACKWARD, action.stage, action.micro_batch) if action.stage > 0 else None


def depends_on(action: Action, num_stages: int) -> list[Action]:
    """List the compute actions, of any rank, whose results a compute action needs."""
    stage, i = action.stage, action.micro_batch
    if action.kind is Kind.FORWARD:
        return [Action(Kind.FORWARD, stage - 1, i)] if stage > 0 else []
    later = [Action(Kind.BACKWARD, stage + 1, i)] if stage < num_stages - 1 else []
    return [Action(Kind.FORWARD, stage, i), *later]


def lower(schedule: Schedule, num_stages: int, lookahead: int = 1) -> Schedule:
    """Add sends and receives to a schedule.

    A send stands right behind the compute action that makes its payload. A receive is posted ``lookahead`` compute
    actions before the one that needs it, so that the transfer hides behind them; earlier, where the sender's order
    within the channel asks for that.

    Args:
        schedule: Compute actions of each rank.
        num_stages: Stages of the model, a multiple of the number of ranks.
        lookahead: Compute actions that a receive runs ahead, at least 0; each costs one more buffer.

    Returns:
        Programs, one a rank: the same compute actions in the same order, with communication between them. Stages on
        one rank need none, so that with one rank the schedule is returned as it is.

    Raises:
        ValueError: If ``lookahead`` is negative, or :func:`validate` refuses the schedule.
    """
    if lookahead < 0:
        raise ValueError(f"lookahead={lookahead} would post receives after their use. Use 0 or more.")
    receives = _place_receives(schedule, num_stages, lookahead)
    programs: Schedule = []
    for rank, row in enumerate(schedule):
        program: list[Action] = []
        for slot, action in enumerate(row):
            send = send_of(action, len(schedule), num_stages)
            program += [*receives[rank, slot], action, *([send] if send else [])]
        programs.append(program)
    validate(programs, num_stages)
    return programs


def _place_receives(schedule: Schedule, num_stages: int, lookahead: int) -> dict[tuple[int, int], list[Action]]:
    p = len(schedule)
    slots: dict[Action, int] = {}
    sent: dict[Channel, list[Action]] = defaultdict(list)
    for row in schedule:
        for slot, action in enumerate(row):
            if receive := receive_of(action, p, num_stages):
                slots[receive] = max(0, slot - lookahead)
            if send := send_of(action, p, num_stages):
                sent[channel_of(send, p)].append(counterpart(send))
    placed: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for channel, messages in sent.items():
        latest = len(schedule[channel.target])
        for receive in reversed(messages):  # never behind a later message of its channel
            latest = slots[receive] = min(latest, slots.get(receive, latest))
        for receive in messages:
            placed[channel.target, slots[receive]].append(receive)
    return placed


def validate(programs: Schedule, num_stages: int) -> None:
    """Refuse programs that compute something wrong, or that could hang with messages matched in order or by tag.

    Args:
        programs: Compute and communication actions of each rank.
        num_stages: Stages of the model, a multiple of the number of ranks.

    Raises:
        ValueError: With the names of the actions that are on the wrong rank, there twice, missing, before what they
            need, in another order than their channel's sends, or that wait for one another.
    """
    if not programs or num_stages < 1 or num_stages % len(programs):
        raise ValueError(
            f"{num_stages} stages cannot be dealt to {len(programs)} ranks in equal numbers. "
            f"Use a multiple of the number of ranks."
        )
    _check_places(programs, num_stages)
    _check_complete(programs, num_stages)
    _check_local_order(programs, num_stages)
    _check_channels(programs)
    _check_progress(programs, num_stages)


def _check_places(programs: Schedule, num_stages: int) -> None:
    p, seen = len(programs), set[Action]()
    for rank, program in enumerate(programs):
        strangers = [a for a in program if not 0 <= a.stage < num_stages or a.stage % p != rank]
        _refuse(strangers, f"actions of stages that rank {rank} of {p} does not hold, out of {num_stages} stages")
        for action in program:
            _refuse([action] if action in seen else [], "an action is there twice")
            seen.add(action)


def _check_complete(programs: Schedule, num_stages: int) -> None:
    compute = {a for a in _flat(programs) if a.kind in COMPUTE}
    num_micro_batches = 1 + max((a.micro_batch for a in compute), default=0)
    kinds = COMPUTE if any(a.kind is Kind.BACKWARD for a in compute) else (Kind.FORWARD,)
    wanted = {Action(k, s, i) for k in kinds for s in range(num_stages) for i in range(num_micro_batches)}
    _refuse(wanted - compute, f"with {num_micro_batches} micro-batches and {num_stages} stages, actions are missing")
    _refuse(compute - wanted, "micro-batches are numbered from 0")


def _check_local_order(programs: Schedule, num_stages: int) -> None:
    p = len(programs)
    for program in programs:
        place = {action: i for i, action in enumerate(program)}
        compute = [a for a in program if a.kind in COMPUTE]
        receives = {receive: a for a in compute if (receive := receive_of(a, p, num_stages))}
        sends = {send: a for a in compute if (send := send_of(a, p, num_stages))}
        needed = receives.keys() | sends.keys()
        _refuse(needed - place.keys(), "communication is missing")
        _refuse([a for a in program if a.kind not in COMPUTE and a not in needed], "communication that nothing needs")
        _refuse([r for r, a in receives.items() if place[r] > place[a]], "receives stand behind their use")
        _refuse([s for s, a in sends.items() if place[s] < place[a]], "sends stand before their payload is made")


def _check_channels(programs: Schedule) -> None:
    p = len(programs)
    sent: dict[Channel, list[Action]] = defaultdict(list)
    posted: dict[Channel, list[Action]] = defaultdict(list)
    for action in _flat(programs):
        if action.kind in SENDS:
            sent[channel_of(action, p)].append(counterpart(action))
        elif action.kind in RECEIVES:
            posted[channel_of(action, p)].append(action)
    for channel in sent.keys() | posted.keys():
        differ = [b for a, b in zip(sent[channel], posted[channel], strict=True) if a != b]
        _refuse(differ, f"receives are posted in another order than rank {channel.source} sends")


def _check_progress(programs: Schedule, num_stages: int) -> None:
    graph: TopologicalSorter[Action] = TopologicalSorter()
    for program in programs:
        before: list[Action] = []
        for action in (a for a in program if a.kind in COMPUTE):
            graph.add(action, *depends_on(action, num_stages), *before)
            before = [action]
    try:
        graph.prepare()
    except CycleError as error:
        _refuse(error.args[1], "actions wait for one another", limit=None)


def _flat(programs: Schedule) -> Iterator[Action]:
    return (action for program in programs for action in program)


def _refuse(actions: Iterable[Action], why: str, limit: int | None = 6) -> None:
    names = [str(action) for action in actions]
    if names:
        shown = sorted(names)[:limit] if limit else names  # a cycle keeps its order
        rest = f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
        raise ValueError(f"not a valid pipeline program: {why}: {', '.join(shown)}{rest}.")
