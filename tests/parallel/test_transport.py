from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.functional.lowering import RECEIVES, SENDS, counterpart, lower
from lightning_hybrid.functional.schedules import Kind, choose, forward_only
from lightning_hybrid.parallel.mesh import Layout, Mesh
from lightning_hybrid.parallel.pipeline.transport import Transport
from tests.launch import run_ranks

CPU = torch.device("cpu")


def mesh_and_transport(num_stages):
    mesh = Mesh(Layout(2, 1), device=CPU)
    return mesh.pipeline_rank, Transport(mesh, num_stages)


def message(stage, micro_batch):
    """Different shapes and types: a matrix, a number and something empty."""
    value = 100.0 * stage + micro_batch
    return [torch.full((2, 3), value), torch.tensor(int(value)), torch.zeros(0, 4)]


def around_the_ring():
    """Four stages on two ranks: each boundary, straight or wrapped, both ways, several micro-batches under way."""
    rank, transport = mesh_and_transport(4)
    empty = [torch.empty(2, 3), torch.empty((), dtype=torch.int64), torch.empty(0, 4)]
    boundaries = [(stage, i) for stage in range(3) for i in range(3)]
    seen = {}
    for forward in (True, False):
        for stage, i in boundaries:
            receiver = stage + 1 if forward else stage
            if receiver % 2 == rank:
                transport.post([torch.empty_like(buffer) for buffer in empty], receiver, i, forward=forward)
        for stage, i in boundaries:
            sender = stage if forward else stage + 1
            if sender % 2 == rank:
                transport.send(message(sender, i), sender, i, forward=forward)
        for stage, i in reversed(boundaries):  # taken in another order than they were sent
            receiver = stage + 1 if forward else stage
            if receiver % 2 == rank:
                matrix, number, nothing = transport.take(receiver, i, forward=forward)
                seen[forward, receiver, i] = (matrix.unique().tolist(), number.item(), tuple(nothing.shape))
    transport.finish()
    return seen


def test_messages_reach_the_neighbouring_stage_both_ways_and_around_the_end():
    first, second = run_ranks(2, around_the_ring)
    seen = first | second
    assert len(seen) == len(first) + len(second) == 18
    for (forward, receiver, i), (matrix, number, shape) in seen.items():
        sender = receiver - 1 if forward else receiver + 1
        assert (matrix, number, shape) == ([100 * sender + i], 100 * sender + i, (0, 4))


CHANNELS = [(forward, lower) for forward in (True, False) for lower in range(3)]


class Done:
    def is_completed(self):
        return True

    wait = is_completed


@pytest.mark.parametrize("pipeline", [2, 3])
def test_boundaries_between_chunks_have_channels_of_their_own(pipeline):
    mesh = SimpleNamespace(
        channels={channel: channel for channel in CHANNELS},
        layout=Layout(pipeline, 1),
        rank_of_stage=lambda stage: stage % pipeline,
    )
    transport, sent, received = Transport(mesh, 2 * pipeline), [], []

    def isend(tensor, *, dst, group, tag):
        sent.append((group, dst, tag))
        return Done()

    def irecv(tensor, *, src, group, tag):
        received.append((group, src, tag))
        return Done()

    tensor, last = torch.ones(1), 2 * pipeline - 1
    with patch.object(dist, "isend", isend), patch.object(dist, "irecv", irecv):
        for i in range(2):
            for stage in range(last):
                transport.send([tensor], stage, i, forward=True)
                transport.post([tensor], stage + 1, i, forward=True)
                transport.send([tensor], stage + 1, i, forward=False)
                transport.post([tensor], stage, i, forward=False)
    names = [(forward, stage % pipeline) for stage in range(last) for forward in (True, False)]
    assert [group for group, _, _ in sent] == [group for group, _, _ in received] == 2 * names
    assert [tag for *_, tag in sent] == [tag for *_, tag in received]  # both ends say the same
    for channel in CHANNELS:
        tags = [(peer, tag) for group, peer, tag in sent if group == channel]
        assert len(set(tags)) == len(tags)


SIZES = [(p, m, v) for p in (2, 3, 4) for m in (1, 2, 3, 4, 8) for v in (1, 2, 3)]


@pytest.mark.parametrize(("p", "m", "v"), SIZES)
def test_each_communicator_sees_sends_and_receives_in_one_order(p, m, v):
    """NCCL matches by order in a communicator: what the lowering proves must hold for the groups really used."""
    mesh = SimpleNamespace(layout=Layout(p, 1), rank_of_stage=lambda stage: stage % p, channels=EveryChannel())
    transport = Transport(mesh, p * v)
    schedules = [choose(name, p, m, v) for name in ("gpipe", "interleaved_1f1b" if v > 1 else "1f1b")]
    for schedule in [*schedules, forward_only(p, m, v)]:
        ends = defaultdict(lambda: ([], []))
        for program in lower(schedule, p * v):
            for action in program:
                if action.kind in SENDS + RECEIVES:
                    used(transport, action, ends)
        assert len(ends) > 0
        for sent, received in ends.values():
            assert sent == received


class EveryChannel:
    def __getitem__(self, channel):
        return channel


def used(transport, action, ends):
    """Note which communicator the transport takes for an action, and for which message, between which ranks."""
    forward = action.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
    call = partial(transport.send if action.kind in SENDS else transport.post, [torch.ones(1)])

    def note(tensor, *, group, tag, **peer):
        side = ends[group][0 if "dst" in peer else 1]
        side.append(counterpart(action) if "dst" in peer else action)
        return Done()

    with patch.object(dist, "isend", note), patch.object(dist, "irecv", note):
        call(action.stage, action.micro_batch, forward=forward)


def buffers_live():
    rank, transport = mesh_and_transport(2)
    if rank == 0:
        for i in range(5):
            source = torch.full((3, 2), float(i), requires_grad=True)
            transport.send([source.t()], 0, i, forward=True)  # not contiguous, needs a gradient, and is gone at once
            del source
    else:
        for i in range(5):
            transport.post([torch.empty(2, 3)], 1, i, forward=True)
        return [transport.take(1, i, forward=True)[0].mean().item() for i in range(5)]
    return transport.finish()


def test_what_is_sent_may_be_strided_and_is_kept_until_it_has_left():
    assert run_ranks(2, buffers_live)[1] == [0, 1, 2, 3, 4]


def misuse():
    rank, transport = mesh_and_transport(2)
    transport.send([], 0, 0, forward=True) if rank == 0 else transport.post([], 1, 0, forward=True)
    if rank == 0:
        transport.finish()
        with pytest.raises(KeyError):
            transport.take(0, 0, forward=False)
        return True
    with pytest.raises(AssertionError, match="received and never used"):
        transport.finish()
    assert transport.take(1, 0, forward=True) == []
    transport.finish()
    return True


def test_nothing_is_left_over_after_a_step():
    assert run_ranks(2, misuse) == [True, True]
