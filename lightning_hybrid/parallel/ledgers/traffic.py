"""Counts the bytes that collectives move, wherever they are called from.

All roads lead to the operations of torch's `c10d` library: functions of `torch.distributed`, functional collectives,
`fully_shard`, and the C++ of `DistributedDataParallel`. While a counter is active they have one kernel more.
What was considered: torch's `CommDebugMode` counts calls without bytes, and like any dispatch mode it sees every
operation of the model too and switches compilation off; wrapping the functions of `torch.distributed` misses C++ and
names that were imported before.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.compat import before_backend, in_backward
from lightning_hybrid.functional.traffic import ring_bytes
from lightning_hybrid.functional.trees import leaves_of

AXES = ("pipeline", "data", "tensor", "expert", "holders", "world", "other")
PHASES = ("forward", "backward", "step")

OPERATIONS = {  # of c10d -> collective, positions of the argument that is handed over and of the whole tensor
    "allreduce_": ("all_reduce", 0, 0),
    "allreduce_coalesced_": ("all_reduce", 0, 0),
    "reduce_": ("reduce", 0, 0),
    "broadcast_": ("broadcast", 0, 0),
    "allgather_": ("all_gather", 1, 0),
    "_allgather_base_": ("all_gather", 1, 0),
    "allgather_coalesced_": ("all_gather", 1, 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 1, 0),
    "reduce_scatter_": ("reduce_scatter", 1, 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1, 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, 1),
    "gather_": ("gather", 1, 1),
    "scatter_": ("scatter", 0, 0),
    "alltoall_": ("all_to_all", 1, 1),
    "alltoall_base_": ("all_to_all", 1, 1),
    "send": ("send", 0, 0),
    "recv_": ("recv", 0, 0),
    "recv_any_source_": ("recv", 0, 0),
    "barrier": ("barrier", None, None),
    "monitored_barrier_": ("barrier", None, None),
}


class Row(NamedTuple):
    """What one line of traffic is about.

    Attributes:
        axis: One of `AXES`, by the description of the process group.
        phase: "forward": sent along the pipeline, or called while a module's forward runs. "backward": sent against
            it, or called by a backward pass. "step": the rest, such as the reduction at the end of a step.
        collective: Its name in `torch.distributed`; those that carry objects end in "_object" or "_object_list".
        dtype: Of the tensors, without "torch."; empty for a barrier.
    """

    axis: str
    phase: str
    collective: str
    dtype: str


@dataclass
class Traffic:
    """Sums over calls.

    Attributes:
        calls: Number of calls; a collective of objects makes two, one for lengths and one for bytes.
        payload: Bytes of the tensors that this rank handed over (of a receive: that it got).
        wire: Bytes that a rank sends if the collective runs over a ring (`functional.traffic.ring_bytes`).
        largest: Bytes of the largest tensor that a call needs whole, on this rank: what it sums, or gathers into.
    """

    calls: int = 0
    payload: int = 0
    wire: float = 0.0
    largest: int = field(default=0, compare=False)

    def __iadd__(self, other: Traffic) -> Traffic:
        self.calls += other.calls
        self.payload += other.payload
        self.wire += other.wire
        self.largest = max(self.largest, other.largest)
        return self


Counts = dict[Row, Traffic]


class TrafficCounter:
    """Counts this process's collectives between `with` and its end, over all threads.

    Attributes:
        counts: What was counted since the last `take`.
        enabled: Set it to False to pause.
    """

    def __init__(self) -> None:
        self.counts: Counts = {}
        self.enabled = True

    def __enter__(self) -> TrafficCounter:
        _Interception.start(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _Interception.stop(self)

    def take(self) -> Counts:
        """Return the counts and begin anew."""
        counts, self.counts = self.counts, {}
        return counts


class _Interception:
    """The kernels, which are there while any counter is."""

    counters: list[TrafficCounter] = []  # noqa: RUF012 - kernels are the process's, and so is the list
    lock = threading.RLock()
    silent = 0
    library: torch.library.Library | None = None

    @classmethod
    def start(cls, counter: TrafficCounter) -> None:
        with cls.lock:
            if cls.library is None:
                cls.library = torch.library.Library("c10d", "IMPL")
                for name in OPERATIONS:
                    kernel = before_backend(getattr(torch.ops.c10d, name).default, _watcher(name))
                    cls.library.impl(name, kernel, "BackendSelect", with_keyset=True)
            cls.counters.append(counter)

    @classmethod
    def stop(cls, counter: TrafficCounter) -> None:
        with cls.lock:
            cls.counters.remove(counter)
            if not cls.counters:
                cls.library = None  # takes the kernels away

    @classmethod
    def add(cls, row: Row, traffic: Traffic) -> None:
        with cls.lock:
            for counter in cls.counters if not cls.silent else ():
                if counter.enabled:
                    accumulate(counter.counts, {row: traffic})


@contextmanager
def uncounted() -> Iterator[None]:
    """For collectives of the measurement itself: no counter sees them."""
    _Interception.silent += 1
    try:
        yield
    finally:
        _Interception.silent -= 1


def accumulate(total: Counts, more: Mapping[Row, Traffic]) -> Counts:
    """Add counts to others in place; returns them."""
    for row, traffic in more.items():
        total.setdefault(row, Traffic()).__iadd__(traffic)
    return total


def sums(counts: Mapping[Row, Traffic]) -> dict[tuple[str, str], Traffic]:
    """Sums by axis and phase. Receives are left out: their bytes are counted where they are sent."""
    totals: dict[tuple[str, str], Traffic] = {}
    for row, traffic in counts.items():
        if row.collective != "recv" and not row.collective.startswith("recv_"):
            totals.setdefault((row.axis, row.phase), Traffic()).__iadd__(traffic)
    return totals


def over_ranks(value: Any) -> list[Any]:
    """A value of each rank of the world, on every rank; uncounted. Without a process group, this one's alone."""
    if not dist.is_initialized():
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size()
    with uncounted():
        dist.all_gather_object(everyone, value)
    return everyone


def _watcher(name: str) -> Any:
    collective, handed, whole = OPERATIONS[name]

    def watch(args: tuple[Any, ...]) -> None:
        group = dist.ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject)))
        tensors = [] if handed is None else _tensors(args[handed])
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        size = 0 if whole is None else _bytes(_tensors(args[whole]))
        wire = 0.0 if whole is None else ring_bytes(collective, size, group.size())
        called, in_forward = _callers()
        axis, direction = _axis(group)
        phase = direction or ("backward" if in_backward() else "forward" if in_forward else "step")
        _Interception.add(Row(axis, phase, called or collective, dtype), Traffic(1, _bytes(tensors), wire, size))

    return watch


def _tensors(argument: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(argument) if isinstance(leaf, Tensor)]


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _axis(group: dist.ProcessGroup) -> tuple[str, str]:
    """Axis of a group, and the direction if its messages have one."""
    name, _, direction = str(group.group_desc).partition(" ")
    if name == "default_pg":
        return "world", ""
    return (name, direction if direction in PHASES else "") if name in AXES else ("other", "")


OBJECT_FUNCTIONS = {
    inspect.unwrap(getattr(dist, name)).__code__: name
    for name in (
        "all_gather_object",
        "gather_object",
        "broadcast_object_list",
        "scatter_object_list",
        "send_object_list",
        "recv_object_list",
    )
}
MODULE_CALL = nn.Module.__call__.__code__


def _callers() -> tuple[str, bool]:
    """The collective of objects that calls, or nothing, and whether a module's forward is under way."""
    called, in_forward = "", False
    frame = inspect.currentframe()
    while frame is not None:
        called = OBJECT_FUNCTIONS.get(frame.f_code, called)
        in_forward = in_forward or frame.f_code is MODULE_CALL
        frame = frame.f_back
    return called, in_forward
