"""Parts that many ranks hold, brought to the first one tensor by tensor and written as they come.

The first rank never holds more than one whole tensor and two buffers, and no rank sends more than it is asked for.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.functional.boxes import Box
from lightning_hybrid.parallel.checkpoint.hollow import BLOCK, byte_view
from lightning_hybrid.parallel.checkpoint.hollow_torch import HollowCheckpoint, placeholder
from lightning_hybrid.parallel.checkpoint.parts import Parts

Spec = tuple[tuple[int, ...], torch.dtype]  # a whole tensor's shape and type
Write = Callable[[str, Box, Tensor], None]  # takes a part of a tensor, whose memory is used again when it returns
Target = Callable[[Mapping[str, Spec]], AbstractContextManager[Write]]  # opened with all tensors; closed when all is in


class LostRankError(RuntimeError):
    """Another rank no longer answers."""


def stream_parts(parts: Parts, group: dist.ProcessGroup | None, target: Target | None = None) -> None:
    """Write all tensors of which the ranks hold parts; every rank of the group calls it.

    Of equal boxes on several ranks, that of the lowest rank is taken.

    Args:
        parts: What this rank has, on any device.
        group: Communicates in host memory, as gloo's; None for the default group.
        target: On the group's first rank: where the tensors go.

    Raises:
        ValueError: On all ranks, if the parts do not cover each tensor once.
        OSError: On all ranks, if the target cannot be written.
        LostRankError: If a rank is gone, or slower than the group's timeout.
    """
    if dist.get_rank(group) > 0:
        _deliver(parts, group)
        return
    assert target is not None, "the first rank writes"
    described = _describe(parts, group, [None] * dist.get_world_size(group))
    started = False
    try:
        plan = make_plan(described)
        with target(plan.tensors) as write:
            _scatter([plan.orders(rank) for rank in range(len(described))], group)
            started = True
            _write_all(plan, parts, group, write)
    except LostRankError:
        raise  # the others would wait for each other once more
    except Exception as error:
        if started:
            _tell(_portable(error), group)
        else:
            _scatter([_portable(error)] * len(described), group)
        raise
    _tell(None, group)


def to_checkpoint(path: str | os.PathLike[str], build: Callable[[Mapping[str, Tensor]], Mapping[str, Any]]) -> Target:
    """A target that is one file of torch.save.

    Args:
        path: The file's.
        build: Makes the checkpoint of placeholders by the tensors' names; each must stand in it.
    """

    @contextmanager
    def opened(tensors: Mapping[str, Spec]) -> Iterator[Write]:
        places = {name: placeholder(*spec) for name, spec in tensors.items()}
        with HollowCheckpoint(path, build(places)) as file:
            yield lambda name, box, data: file.write(places[name], box, data)

    return opened


def to_memory(found: dict[str, Tensor]) -> Target:
    """A target that is a dictionary of whole tensors in host memory."""

    @contextmanager
    def opened(tensors: Mapping[str, Spec]) -> Iterator[Write]:
        found.update({name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in tensors.items()})

        def write(name: str, box: Box, data: Tensor) -> None:
            box.view(found[name]).copy_(data)

        yield write

    return opened


@dataclass(frozen=True)
class Plan:
    """What is sent, in one order.

    Attributes:
        tensors: All of them.
        owners: For each, the rank that each box is taken from.
    """

    tensors: Mapping[str, Spec]
    owners: Mapping[str, Mapping[Box, int]]

    def messages(self) -> Iterator[tuple[str, Box, Box, int]]:
        """Each as (tensor, box that its rank holds, part of that which is sent at once, rank)."""
        for name, boxes in self.owners.items():
            for box, rank in sorted(boxes.items()):
                for sent in box.cut(BLOCK // self.tensors[name][1].itemsize):
                    yield name, box, sent, rank

    def orders(self, rank: int) -> list[tuple[str, Box]]:
        """The boxes that a rank is to send."""
        return [(name, box) for name, boxes in self.owners.items() for box in sorted(boxes) if boxes[box] == rank]


def make_plan(described: Sequence[Mapping[str, tuple[Spec, list[Box]]]]) -> Plan:
    """Decide who sends what.

    Args:
        described: Of each rank, the tensors of which it has parts.

    Raises:
        ValueError: If the boxes do not cover each tensor exactly once.
    """
    tensors: dict[str, Spec] = {}
    owners: dict[str, dict[Box, int]] = {}
    for rank, known in enumerate(described):
        for name, (spec, boxes) in known.items():
            if tensors.setdefault(name, spec) != spec:
                raise ValueError(f"{name} is {_words(spec)} on rank {rank} and {_words(tensors[name])} on a lower one.")
            mine = owners.setdefault(name, {})
            for box in boxes:
                if box.numel:
                    mine.setdefault(box, rank)
    for name, spec in tensors.items():
        _check_cover(name, spec[0], owners[name])
    return Plan(tensors, owners)


def _check_cover(name: str, shape: tuple[int, ...], owners: Mapping[Box, int]) -> None:
    open_boxes: list[Box] = []  # those that reach as far in the first dimension as the next one begins
    for box in sorted(owners):
        open_boxes = [other for other in open_boxes if other.ends[:1] > box.offsets[:1]]
        clash = next((other for other in open_boxes if other.meet(box)), None)
        if clash is not None:
            raise ValueError(
                f"Ranks {owners[clash]} and {owners[box]} hold parts of {name} that overlap: {clash} and {box}."
            )
        open_boxes.append(box)
    held, total = sum(box.numel for box in owners), Box.of(shape).numel
    if held != total:
        raise ValueError(f"All ranks together hold {held} of the {total} elements of {name}; it cannot be saved.")


def _write_all(plan: Plan, parts: Parts, group: dist.ProcessGroup | None, write: Write) -> None:
    """Write what arrives; after an error the rest still arrives, so that nobody waits for a rank that gave up."""
    put, failure = _Assembly(plan, write), None
    for name, box, data in _arrivals(plan, parts, group):
        if failure is None:
            try:
                put(name, box, data)
            except Exception as error:
                failure = error
    if failure is not None:
        raise failure


class _Assembly:
    """Passes on what lies in one piece in the whole, and completes other tensors in memory, one after the other."""

    def __init__(self, plan: Plan, write: Write) -> None:
        self._plan, self._write, self._missing = plan, write, 0

    def __call__(self, name: str, box: Box, data: Tensor) -> None:
        shape, dtype = self._plan.tensors[name]
        if not self._missing:
            if all(next(held.runs(shape))[1] == held for held in self._plan.owners[name]):
                self._write(name, box, data)
                return
            self._whole, self._missing = torch.empty(shape, dtype=dtype), Box.of(shape).numel
        box.view(self._whole).copy_(data)
        self._missing -= box.numel
        if not self._missing:
            self._write(name, Box.of(shape), self._whole)
            del self._whole


def _arrivals(plan: Plan, parts: Parts, group: dist.ProcessGroup | None) -> Iterator[tuple[str, Box, Tensor]]:
    """All messages in order; while one is written, the next is already received."""
    buffers = deque(torch.empty(2, BLOCK, dtype=torch.uint8))
    ahead: deque[tuple[str, Box, int, Tensor, dist.Work | None]] = deque()
    held = {name: {piece.box: piece.data for piece in part.pieces} for name, part in parts.items()}
    for name, box, sent, rank in plan.messages():
        dtype, work = plan.tensors[name][1], None
        if rank == 0:
            data = sent.within(box).view(held[name][box])
        else:
            buffers.rotate()
            flat = buffers[0][: sent.numel * dtype.itemsize]
            work, data = dist.irecv(flat, group=group, group_src=rank), flat.view(dtype).view(sent.sizes)
        ahead.append((name, sent, rank, data, work))
        if len(ahead) > 1:
            yield _arrived(*ahead.popleft())
    while ahead:
        yield _arrived(*ahead.popleft())


def _arrived(name: str, box: Box, rank: int, data: Tensor, work: dist.Work | None) -> tuple[str, Box, Tensor]:
    if work is not None:
        with _or_lost(f"Rank {rank} did not send its part of {name}"):
            work.wait()
    return name, box, data.detach().cpu()


def _deliver(parts: Parts, group: dist.ProcessGroup | None) -> None:
    """Send what the first rank asks for, at most two messages ahead of it."""
    _describe(parts, group)
    held = {name: {piece.box: piece.data for piece in part.pieces} for name, part in parts.items()}
    under_way: deque[tuple[Tensor, dist.Work]] = deque()
    for name, box in _scatter(None, group):
        data = held[name][box]
        for sent in box.cut(BLOCK // data.element_size()):
            message = byte_view(sent.within(box).view(data))
            with _or_lost("The first rank no longer takes what is to be saved"):
                work = dist.isend(message, group=group, group_dst=0)
                assert work is not None
                under_way.append((message, work))
                if len(under_way) > 1:
                    under_way.popleft()[1].wait()
    with _or_lost("The first rank no longer takes what is to be saved"):
        while under_way:
            under_way.popleft()[1].wait()
    outcome = _tell(None, group)
    if outcome is not None:
        raise outcome


def _scatter(orders: list[Any] | None, group: dist.ProcessGroup | None) -> list[tuple[str, Box]]:
    """This rank's of the orders that the first one gives to each; an error instead of them is raised."""
    mine: list[Any] = [None]
    with _or_lost("A rank is gone before anything was written"):
        dist.scatter_object_list(mine, orders, group=group, group_src=0)
    if isinstance(mine[0], Exception) and orders is None:
        raise mine[0]
    found: list[tuple[str, Box]] = mine[0]
    return found


def _portable(error: Exception) -> Exception:
    """An error that other ranks can raise: of a plain type, with its words."""
    for kind in (ValueError, OSError):
        if isinstance(error, kind):
            return kind(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")


def _describe(parts: Parts, group: dist.ProcessGroup | None, found: list[Any] | None = None) -> list[Any]:
    """Tell the first rank what this one has; it gets all in its list."""
    mine = {name: ((part.shape, part.dtype), [piece.box for piece in part.pieces]) for name, part in parts.items()}
    with _or_lost("A rank is gone before anything was written"):
        dist.gather_object(mine, found, group=group, group_dst=0)
    return found or []


def _tell(outcome: Exception | None, group: dist.ProcessGroup | None) -> Exception | None:
    """What the first rank says when all is done."""
    told: list[Any] = [outcome]
    with _or_lost("A rank is gone after everything was written"):
        dist.broadcast_object_list(told, group=group, group_src=0)
    found: Exception | None = told[0]
    return found


@contextmanager
def _or_lost(words: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(f"{words}: {error}") from error


def _words(spec: Spec) -> str:
    return f"{list(spec[0])} of {spec[1]}"
