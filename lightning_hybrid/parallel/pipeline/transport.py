"""Moves payloads and their gradients between stages: receives are posted early, sends are waited for late.

Each direction over each boundary has a communicator of its own (`Mesh.channels`), in which messages are matched by
order, as NCCL does; gloo matches by the same order and by tag.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.parallel.mesh import Mesh

Received = tuple[list[Tensor], list[dist.Work]]


class Transport:
    """Sends to and receives from the neighbouring stages of one rank.

    Args:
        mesh: Groups and coordinates of this rank.
        num_stages: Stages of the whole model.
    """

    def __init__(self, mesh: Mesh, num_stages: int) -> None:
        self._mesh, self._num_stages = mesh, num_stages
        self._received: dict[tuple[bool, int, int], Received] = {}
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, tensors: Sequence[Tensor], stage: int, micro_batch: int, *, forward: bool) -> None:
        """Start sending from `stage` to the next one (forward) or the previous one; buffers live until it is done."""
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        target = stage + 1 if forward else stage - 1
        group, peer = self._route(min(stage, target), target, forward)
        for tensor in tensors:
            message = tensor.detach().contiguous()
            tag = self._tag(target, micro_batch)
            work = dist.isend(message, dst=peer, group=group, tag=tag)
            assert work is not None
            self._sending.append((work, message))

    def post(self, buffers: Sequence[Tensor], stage: int, micro_batch: int, *, forward: bool) -> None:
        """Start receiving what the neighbour sends to `stage`."""
        source = stage - 1 if forward else stage + 1
        group, peer = self._route(min(stage, source), source, forward)
        works = []
        for buffer in buffers:
            work = dist.irecv(buffer, src=peer, group=group, tag=self._tag(stage, micro_batch))
            assert work is not None
            works.append(work)
        self._received[forward, stage, micro_batch] = list(buffers), works

    def take(self, stage: int, micro_batch: int, *, forward: bool) -> list[Tensor]:
        """Wait for what was posted, and return it."""
        buffers, works = self._received.pop((forward, stage, micro_batch))
        for work in works:
            work.wait()
        return buffers

    def finish(self) -> None:
        """Wait for all sends of the step."""
        while self._sending:
            self._sending.popleft()[0].wait()
        assert not self._received, f"received and never used: {list(self._received)}"

    def _route(self, lower: int, peer_stage: int, forward: bool) -> tuple[dist.ProcessGroup, int]:
        channel = forward, lower % self._mesh.layout.pipeline
        return self._mesh.channels[channel], self._mesh.rank_of_stage(peer_stage)

    def _tag(self, target: int, micro_batch: int) -> int:
        return micro_batch * self._num_stages + target
