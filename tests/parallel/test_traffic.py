import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_reduce as imported_before
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_hybrid.compat import all_gather_flat
from lightning_hybrid.parallel.ledgers.traffic import Row, Traffic, TrafficCounter, over_ranks, sums, uncounted
from tests.launch import run_ranks


def numbers(counts):
    return {tuple(row): (traffic.calls, traffic.payload, traffic.wire) for row, traffic in counts.items()}


def called(function, *args, **kwargs):
    with TrafficCounter() as counter:
        function(*args, **kwargs)
    return numbers(counter.take())


def world(collective, dtype, *traffic, phase="step"):
    return {("world", phase, collective, dtype): traffic}


def every_collective():
    rank = dist.get_rank()
    x, two = torch.ones(6), [torch.ones(3), torch.ones(3)]
    assert called(dist.all_reduce, x) == world("all_reduce", "float32", 1, 24, 24.0)
    assert called(dist.reduce, x, 0) == world("reduce", "float32", 1, 24, 12.0)
    assert called(dist.broadcast, x.half(), 0) == world("broadcast", "float16", 1, 12, 6.0)
    assert called(dist.all_gather, [torch.empty(6), torch.empty(6)], x) == world("all_gather", "float32", 1, 24, 24.0)
    assert called(all_gather_flat, torch.empty(12), x) == world("all_gather", "float32", 1, 24, 24.0)
    assert called(dist.reduce_scatter, torch.empty(3), two) == world("reduce_scatter", "float32", 1, 24, 12.0)
    assert called(dist.gather, x, [x, x] if rank == 0 else None) == world("gather", "float32", 1, 24, 12.0)
    assert called(dist.scatter, x, [x, x] if rank == 0 else None) == world("scatter", "float32", 1, 24, 12.0)
    assert called(dist.all_to_all_single, torch.empty(6), x) == world("all_to_all", "float32", 1, 24, 12.0)
    assert called(dist.barrier) == called(dist.monitored_barrier) == world("barrier", "", 1, 0, 0.0)
    assert called(dist.all_gather_object, [None, None], "x")["world", "step", "all_gather_object", "int64"][:2] == (
        1,
        8,
    )
    assert {row[2] for row in called(dist.broadcast_object_list, ["x"], 0)} == {"broadcast_object_list"}
    return True


def test_each_collective_is_counted_with_its_bytes(results):
    assert [result["every_collective"] for result in results] == [True, True]


def messages():
    peer, x = 1 - dist.get_rank(), torch.ones(5, dtype=torch.float64)
    with TrafficCounter() as counter:
        work = dist.isend(x, peer)
        dist.recv(torch.empty_like(x), peer)
        work.wait()
    counts = counter.take()
    return numbers(counts), numbers(sums(counts))


def test_messages_have_two_ends_and_are_summed_once(results):
    both = world("send", "float64", 1, 40, 40.0) | world("recv", "float64", 1, 40, 0.0)
    assert [result["messages"] for result in results] == [(both, {("world", "step"): (1, 40, 40.0)})] * 2


def from_everywhere():
    """Functional and imported collectives, C++ of DDP, inference mode, another thread."""
    x = torch.ones(4)
    whole = world("all_reduce", "float32", 1, 16, 16.0)
    assert called(imported_before, x) == whole
    assert called(torch.inference_mode()(lambda: dist.all_reduce(torch.ones(4)))) == whole
    functional = torch.ops._c10d_functional
    assert called(lambda: functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD.group_name))) == whole
    thread = threading.Thread(target=dist.all_reduce, args=(x,))
    assert called(lambda: (thread.start(), thread.join())) == whole
    net = DistributedDataParallel(nn.Linear(3, 1))
    output = net(torch.ones(2, 3))
    assert called(output.sum().backward) == world("all_reduce", "float32", 1, 16, 16.0, phase="backward")
    return True


def test_collectives_are_seen_wherever_they_are_called_from(results):
    assert [result["from_everywhere"] for result in results] == [True, True]


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    backward = forward


class Reducing(nn.Module):
    def forward(self, x):
        return Sum.apply(x)


def phases():
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for module in (net[0], net):
        fully_shard(module)
    with TrafficCounter() as counter:
        net(torch.ones(2, 4)).sum().backward()
    sharded = numbers(counter.take())
    x = torch.ones(4, requires_grad=True)
    return sharded, called(lambda: Reducing()(x).sum().backward())


def test_phases_are_told_apart(results):
    for sharded, reducing in [result["phases"] for result in results]:
        assert sharded == {
            ("world", "forward", "all_gather", "float32"): (2, 64, 64.0),
            ("world", "backward", "all_gather", "float32"): (1, 32, 32.0),  # the root's stays gathered
            ("world", "backward", "reduce_scatter", "float32"): (2, 128, 64.0),
        }
        assert set(reducing) == {("world", phase, "all_reduce", "float32") for phase in ("forward", "backward")}


def axes():
    names = ("data", "pipeline forward", "pipeline backward", "holders", "something", None)
    groups = [dist.new_group([0, 1], group_desc=name) for name in names]
    counter = TrafficCounter()
    with counter:
        for group in groups:
            dist.all_reduce(torch.ones(1), group=group)
    return [tuple(row)[:2] for row in counter.counts]


def test_axes_and_directions_are_those_that_groups_are_named_by(results):
    assert [result["axes"] for result in results] == [
        [("data", "step"), ("pipeline", "forward"), ("pipeline", "backward"), ("holders", "step"), ("other", "step")]
    ] * 2


def start_and_stop():
    counter, x = TrafficCounter(), torch.ones(1)
    dist.all_reduce(x)
    with counter:
        dist.all_reduce(x)
        counter.enabled = False
        dist.all_reduce(x)
        counter.enabled = True
        with uncounted():
            dist.all_reduce(x)
        assert over_ranks(dist.get_rank()) == [0, 1]
    dist.all_reduce(x)
    with pytest.raises(ZeroDivisionError), TrafficCounter():
        raise ZeroDivisionError
    dist.all_reduce(x)
    return [traffic.calls for traffic in counter.take().values()], counter.counts


def test_only_what_happens_while_a_counter_is_on_is_counted(results):
    assert [result["start_and_stop"] for result in results] == [([1], {})] * 2


def nested():
    outer, inner = TrafficCounter(), TrafficCounter()
    with outer:
        dist.all_reduce(torch.ones(1))
        with inner:
            dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1))
    return [sum(t.calls for t in counter.take().values()) for counter in (outer, inner)]


def test_counters_do_not_disturb_each_other(results):
    assert [result["nested"] for result in results] == [[3, 1]] * 2


def test_one_process_has_no_other_ranks():
    assert over_ranks("x") == ["x"]
    assert sums({Row("world", "step", "send", "int8"): Traffic(1, 2, 3.0)}) == {("world", "step"): Traffic(1, 2, 3.0)}


def all_of_them():
    parts = (every_collective, messages, from_everywhere, phases, axes, start_and_stop, nested)
    return {part.__name__: part() for part in parts}


@pytest.fixture(scope="module")
def results():
    return run_ranks(2, all_of_them)
