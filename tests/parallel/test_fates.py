"""What a ledger makes of tensors that are dropped or moved: bytes by a calculation by hand."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.parallel.ledgers.fates import announce, observers
from lightning_hybrid.parallel.ledgers.memory import MemoryMeter
from lightning_hybrid.parallel.memory.hooks import ChainedHooks, keep
from tests.parallel.test_memory import measured, tower

SIZE = 5 * 4 * 4  # bytes of what each layer of the tower gets or gives: 5 samples, 4 numbers, float32
NOTHING = {"activations": 0, "recomputed": 0, "offloaded": 0, "compressed": 0}


class Moved:
    """A stand-in for a tensor that is dropped, encoded or moved, with the announcement that whoever does that makes."""

    def __init__(self, tensor, fate):
        self.value, self.release = tensor, announce(tensor, fate)

    def unpack(self):
        return self.value

    def __del__(self):
        self.release()


def inputs():
    return torch.ones(5, 4, requires_grad=True)


def sums(memory):
    totals = memory.totals()
    return {name: totals[name] for name in ("activations", "recomputed", "offloaded", "compressed")}


def mover(net, fate):
    """Takes what is saved by the first of three parts of the tower, but for parameters."""
    fixed = {p.untyped_storage().data_ptr() for p in net.parameters()}

    def pack(tensor):
        if not mover.runs or tensor.untyped_storage().data_ptr() in fixed:
            return None
        return Moved(tensor, fate)

    net[0].register_forward_pre_hook(lambda *_: setattr(mover, "runs", True))
    net[0].register_forward_hook(lambda *_: setattr(mover, "runs", False))
    return pack


@pytest.mark.parametrize("ledger_is_outside", [True, False])
@pytest.mark.parametrize("fate", ["recomputed", "offloaded", "compressed", "kept"])
def test_hooks_that_announce_count_the_same_inside_and_outside(fate, ledger_is_outside):
    mover.runs, net, x = False, tower(), inputs()
    hooks = ChainedHooks(mover(net, fate))
    if ledger_is_outside:
        with measured(net) as memory, hooks:
            net(x).sum().backward()
    else:
        with hooks, measured(net) as memory:
            net(x).sum().backward()
    taken = {"0.0": SIZE, "0.1": SIZE, "0.3": SIZE}  # the input and two results of tanh, which the next layers save too
    rest = {f"{i}.{j}": SIZE for i in (1, 2) for j in (1, 3)}  # the input of part 1 is the result of part 0
    if fate == "kept":
        assert memory.activations == taken | rest
        assert not memory.recomputed
    else:  # the result of part 0 stays after all, as the input of part 1
        assert (getattr(memory, fate), memory.activations) == (taken, {"1.0": SIZE, **rest})
        assert sum(sums(memory).values()) == (3 + 5) * SIZE
    assert not observers


@pytest.mark.parametrize("ledger_is_outside", [True, False])
def test_what_hooks_leave_to_hooks_of_others_counts_as_those_keep_it(ledger_is_outside):
    net, x, passes = tower(), inputs(), ChainedHooks(lambda tensor: None)
    halves = saved_tensors_hooks(lambda t: (t.dtype, t.half()), lambda packed: packed[1].to(packed[0]))
    if ledger_is_outside:
        with measured(net) as memory, halves, passes:
            net(x).sum().backward()
    else:
        with halves, passes, measured(net) as memory:
            net(x).sum().backward()
    # a copy each time that an input, a result or a weight is saved
    copies = 6 * 2 * SIZE // 2
    assert sums(memory) == NOTHING | {"activations": copies + 6 * 4 * 4 * 2}


def test_a_checkpoint_drops_what_it_does_not_keep():
    net, x = tower(), inputs()
    with measured(net) as plain:
        net(x).sum().backward()
    with measured(net) as memory:
        y = x
        for block in net:
            y = checkpoint(block, y, use_reentrant=False)
    # each block's input is kept, and of its two results of tanh the second is the next block's input
    assert memory.recomputed == {"0.1": SIZE, "1.1": SIZE, "2.1": SIZE, "2.3": SIZE}
    assert sums(memory)["activations"] == 3 * SIZE
    assert sum(sums(memory).values()) == sum(sums(plain).values()) == 7 * SIZE


def test_tensors_on_another_device_are_offloaded_and_those_on_this_one_are_not():
    net, x = tower(), inputs()
    with measured(net) as memory, save_on_cpu():
        net(x).sum().backward()
    assert sums(memory) == NOTHING | {"activations": 7 * SIZE}
    with measured(net) as memory, saved_tensors_hooks(lambda t: ("elsewhere", t.to("meta")), None):
        net(x)
    # a copy each time that something is saved, weights too
    assert sums(memory)["offloaded"] == 6 * 2 * SIZE + 6 * 4 * 4 * 4
    assert sums(memory)["activations"] == 0


def test_dropped_bytes_count_until_they_are_released_and_once_while_their_storage_lives():
    net, x = nn.Linear(2, 2), torch.ones(3, 2)
    with measured(net) as memory:
        first, again = announce(x, "recomputed"), announce(x[1:], "recomputed")
        del x
        first()
        other = announce(torch.ones(5), "recomputed")
        again()
        announce(torch.ones(4), "recomputed")()
        other()
    assert memory.recomputed == {"": 3 * 2 * 4 + 5 * 4}


class Fetching(torch.autograd.Function):
    """Announces in its backward pass what has come back, under the module that saved it."""

    @staticmethod
    def forward(ctx, x):
        ctx.away = announce(x, "offloaded")
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        back = torch.zeros(10)
        ctx.away()
        announce(back, "kept", ctx.away)()
        return gradient * 2


class Halving(torch.autograd.Function):
    """Holds a copy of what it gets in half the bytes, after a while, and decodes it for its backward pass."""

    @staticmethod
    def forward(ctx, x):
        raw = x * 1
        kept = announce(raw, "kept")
        ctx.half, ctx.compressed = raw.half(), announce(raw, "compressed", kept)
        ctx.here = announce(ctx.half, "kept", kept)
        kept()
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        decoded = ctx.half.float()
        there = announce(decoded, "kept", ctx.compressed)
        for release in (ctx.compressed, ctx.here, there):
            release()
        return gradient * 2


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function.apply(x)


def test_what_comes_back_belongs_to_the_module_that_saved_it():
    net = nn.Sequential(Calls(Fetching))
    with measured(net) as memory:
        net(torch.ones(3, requires_grad=True)).sum().backward()
    assert (memory.offloaded, memory.activations) == ({"0": 12}, {"0": 40})


def test_a_tensor_is_kept_then_compressed_then_kept_again_under_one_module():
    net = nn.Sequential(Calls(Halving))
    meter = MemoryMeter(net)
    meter.start(recorded=1)
    with meter:
        net(torch.ones(3, requires_grad=True)).sum().backward()
    memory = meter.finish([])
    changes = [(change.kind, change.module, change.num_bytes) for change in meter.timeline.changes]
    meter.close()
    assert changes == [
        ("activations", "0", 12),
        ("compressed", "0", 12),  # both are there while it is encoded
        ("activations", "0", 6),
        ("activations", "0", -12),
        ("activations", "0", 12),
        ("compressed", "0", -12),
        ("activations", "0", -6),
        ("activations", "0", -12),
    ]
    assert [name for name, *_ in meter.timeline.spans()] == ["forward", "backward"]
    assert sums(memory) == NOTHING | {"activations": 12 + 6, "compressed": 12}


def test_of_one_storage_what_is_kept_counts_before_what_is_compressed_and_that_before_what_is_recomputed():
    x, changes = torch.ones(3), []
    meter = MemoryMeter(nn.Linear(1, 1))
    meter.start(recorded=1)
    with meter:
        held = []
        for fate in ("recomputed", "compressed", "recomputed", "kept", "recomputed"):
            held.append(announce(x[1:], fate))
            changes.append([(change.kind, change.num_bytes) for change in meter.timeline.changes])
        for release in held:
            release()
    meter.finish([])
    meter.close()
    assert changes[0] == [("recomputed", 12)]
    assert changes[1] == changes[2] == [*changes[0], ("recomputed", -12), ("compressed", 12)]
    assert changes[3] == changes[4] == [*changes[2], ("compressed", -12), ("activations", 12)]
    assert sum(change.num_bytes for change in meter.timeline.changes) == 0


def test_parameters_have_no_fate():
    net = nn.Linear(2, 2)
    with measured(net) as memory, ChainedHooks(keep):
        for fate in ("kept", "recomputed", "offloaded", "compressed"):
            announce(net.weight.t(), fate)()
    assert sums(memory) == NOTHING
