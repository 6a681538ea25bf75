"""Saved storages have the same keys in every step, whether or not blocks are recomputed."""

import torch
from torch import nn

from lightning_hybrid.parallel.memory import passes
from lightning_hybrid.parallel.memory.calls import Order, surround
from lightning_hybrid.parallel.memory.frames import Site
from lightning_hybrid.parallel.memory.keys import Key, SavedKeys
from lightning_hybrid.parallel.memory.recompute import Recomputation

CPU = torch.device("cpu")


class Block(nn.Module):
    """Its result is saved by its last operation, and is the next block's argument."""

    def __init__(self):
        super().__init__()
        self.linear, self.number = nn.Linear(4, 4), nn.Buffer(torch.ones(4))

    def forward(self, x, scale):
        return torch.relu(self.linear(torch.tanh(x)) * scale * self.number)


class Net(nn.Module):
    def __init__(self, between=lambda x: x):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.between = nn.ModuleList(Block() for _ in range(3)), between

    def forward(self, x):
        x = torch.sin(x)
        for block in self.blocks:
            x = self.between(block(x, torch.full((4,), 2.0)))
        return torch.exp(x).sum()


class Watched:
    """Steps of a net, of whose saved tensors outer hooks note the keys and values."""

    def __init__(self, net, recomputed=()):
        self.net, self.passes, self.found = net, [], {}
        blocks = {f"blocks.{i}": block for i, block in enumerate(net.blocks)}
        self.keys = SavedKeys(net, blocks, CPU)
        self.keys.observer = self
        recomputation = Recomputation([Site(name, block, CPU) for name, block in blocks.items()])
        recomputation.segments = [i if i in recomputed else None for i in range(3)]
        for i, block in enumerate(net.blocks):
            surround(block, Order.RECOMPUTE, recomputation.layer(i))

    def step(self, *inputs):
        self.found = {}
        self.keys.start()
        losses = [self.run(x) for x in inputs]
        self.keys.stop()
        sum(losses).backward()
        return self.found

    def run(self, x):
        passes.begin_pass()
        return self.net(x)

    def saved(self, tensor, met):
        for key in met.keys:
            self.found.setdefault(key, tensor.detach().clone())

    def pass_ended(self, met, called, *, goes_on):
        self.passes.append((met, called, goes_on))


def inputs(number=1):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4, generator=generator, requires_grad=True) for _ in range(number)]


def same(one, other):
    return all(torch.equal(one[key], other[key]) for key in one.keys() & other.keys())


def test_keys_do_not_depend_on_what_is_recomputed_nor_on_the_step():
    kept = Watched(Net()).step(*inputs())
    for recomputed in ([0], [1], [0, 2], [0, 1, 2]):
        watched = Watched(Net(), recomputed)
        first, second = watched.step(*inputs()), watched.step(*inputs())
        assert first.keys() == second.keys()
        assert {key for key in first if not key.is_argument} <= kept.keys()
        assert same(first, kept)
        assert same(first, second)
        groups = {key.group for key in kept if not key.is_argument} - {f"blocks.{i}" for i in recomputed}
        assert {key for key in kept if key.group in groups and not key.is_argument} <= first.keys()
    # of the last block's result, which the code behind it reads
    assert Key("(after blocks.2)", 0, is_argument=False) in kept
    assert Key("(before blocks)", 0, is_argument=False) in kept


def test_a_storage_has_a_key_where_it_is_saved_and_where_it_is_an_argument():
    watched = Watched(Net())
    watched.step(*inputs())
    ((met, called, _),) = watched.passes
    assert called == ["blocks.0", "blocks.1", "blocks.2"]
    handed_on = [storage for storage in met if storage.handed_on]
    assert [storage.handed_on for storage in handed_on] == [{"blocks.1"}, {"blocks.2"}]
    for i, storage in enumerate(handed_on):
        argument = Key(f"blocks.{i + 1}", 0, is_argument=True)
        assert [key.group for key in storage.keys] == [f"blocks.{i}", f"blocks.{i + 1}"]
        assert storage.keys[1] == argument
        assert storage.num_bytes == 2 * 4 * 4
    changed = Watched(Net(between=lambda x: x + 1))
    changed.step(*inputs())
    assert not any(storage.handed_on for storage in changed.passes[0][0])


def test_parameters_buffers_probes_and_backward_passes_have_no_keys():
    net = Net()
    watched = Watched(net)
    watched.step(*inputs())
    watched.keys.start()
    assert watched.keys.saved(torch.zeros(4)) is not None
    assert watched.keys.saved(next(net.parameters()).detach()) is None
    assert watched.keys.saved(torch.eye(2).to_sparse()) is None
    assert watched.keys.saved(torch.zeros(4, device="meta")) is None
    passes.begin_pass(trained=False)
    assert watched.keys.saved(torch.zeros(4)) is None
    watched.keys.stop()
    assert watched.keys.saved(torch.zeros(4)) is None
    watched.keys.close()
    assert all("forward" in vars(block) for block in net.blocks)  # recomputation's layer alone


def test_passes_are_numbered_alike_and_so_are_calls_of_a_block():
    watched = Watched(Net())
    watched.step(*inputs(2))
    (first, *_), (second, *_) = watched.passes
    assert watched.keys.in_flight == 2
    assert [storage.keys for storage in first] == [storage.keys for storage in second]

    class Twice(Net):
        def forward(self, x):
            return self.blocks[0](self.blocks[0](x, torch.ones(4)), torch.ones(4)).sum()

    watched = Watched(Twice())
    watched.step(*inputs())
    (_, *first), (met, *second) = watched.passes
    assert first == [["blocks.0"], True]
    assert second == [["blocks.0"], False]
    assert watched.keys.in_flight == 2
    assert Key("blocks.0", 0, is_argument=True) in met[0].keys
