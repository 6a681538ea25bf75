"""Parts that many ranks hold, brought to the first one tensor by tensor and written as they come.

The first rank never holds more than one whole tensor and two buffers, and no rank sends more than it is asked for.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.functional.boxes import Box
from lightning_hybrid.parallel.checkpoint.hollow import BLOCK
from lightning_hybrid.parallel.checkpoint.hollow_torch import HollowCheckpoint, placeholder
from lightning_hybrid.parallel.checkpoint.parts import Parts
from lightning_hybrid.parallel.checkpoint.stream_plan import Plan, Spec, make_plan

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
        self._scattered = {
            name: Box.of(plan.tensors[name][0]).numel * plan.tensors[name][1].itemsize
            for name, held in plan.owners.items()
            if any(next(box.runs(plan.tensors[name][0]))[1] != box for box in held)
        }
        self._memory = torch.empty(max(self._scattered.values(), default=0), dtype=torch.uint8)  # once, for all

    def __call__(self, name: str, box: Box, data: Tensor) -> None:
        if name not in self._scattered:
            self._write(name, box, data)
            return
        shape, dtype = self._plan.tensors[name]
        whole = self._memory[: self._scattered[name]].view(dtype).view(shape)
        box.view(whole).copy_(data)
        self._missing = (self._missing or Box.of(shape).numel) - box.numel
        if not self._missing:
            self._write(name, Box.of(shape), whole)


def _arrivals(plan: Plan, parts: Parts, group: dist.ProcessGroup | None) -> Iterator[tuple[str, Box, Tensor]]:
    """All messages in order; while one is written, the next is already received."""
    buffers = deque(torch.empty(2, BLOCK, dtype=torch.uint8))
    ahead: deque[tuple[str, Box, int, Tensor, dist.Work | None]] = deque()
    held = {name: {piece.box: piece.data for piece in part.pieces} for name, part in parts.items()}
    for name, box, sent, rank in plan.messages(BLOCK):
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
    under_way: deque[dist.Work] = deque()
    buffers = deque(torch.empty(2, BLOCK, dtype=torch.uint8))
    for name, box in _scatter(None, group):
        data = held[name][box]
        for sent in box.cut(BLOCK // data.element_size()):
            buffers.rotate()
            message = buffers[0][: sent.numel * data.element_size()]
            message.view(data.dtype).view(sent.sizes).copy_(sent.within(box).view(data).detach())
            with _or_lost("The first rank no longer takes what is to be saved"):
                work = dist.isend(message, group=group, group_dst=0)
                assert work is not None
                under_way.append(work)
                if len(under_way) > 1:
                    under_way.popleft().wait()
    with _or_lost("The first rank no longer takes what is to be saved"):
        while under_way:
            under_way.popleft().wait()
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
