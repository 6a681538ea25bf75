"""Calls that are repeated in the backward pass."""

import random
from functools import partial

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from lightning_hybrid.parallel.memory.calls import Order, surround
from lightning_hybrid.parallel.memory.frames import Site
from lightning_hybrid.parallel.memory.hooks import ChainedHooks, keep
from lightning_hybrid.parallel.memory.recompute import Recomputation
from lightning_hybrid.parallel.memory.selective import Selective

WIDTH = 6


class Net(nn.Module):
    """Blocks in a loop of the user's own, with code between them."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def recomputed(net, segments=None, contexts=None):
    sites = [Site(f"blocks.{i}", block, torch.device("cpu")) for i, block in enumerate(net.blocks)]
    recomputation = Recomputation(sites, contexts)
    if segments is not None:
        recomputation.segments = segments
    for position, site in enumerate(sites):
        surround(site.module, Order.RECOMPUTE, recomputation.layer(position))
    return net


def gradients(net, x, **options):
    net.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_() if x.is_floating_point() else x
    net(x).square().sum().backward(**options)
    return [x.grad, *(p.grad for p in net.parameters())], [buffer.clone() for buffer in net.buffers()]


def check_same(make, x=None, segments=None, contexts=None):
    """Twice in a row, so that buffers that change matter."""
    x = torch.randn(5, WIDTH) if x is None else x
    nets = []
    for wrap in (lambda net: net, lambda net: recomputed(net, segments, contexts)):
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(0)
        net = wrap(make())
        nets.append([gradients(net, x), gradients(net, x), torch.rand(1), random.random(), numpy.random.random()])
    torch.testing.assert_close(*nets, rtol=0, atol=0)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), []

    def forward(self, x):
        self.calls.append(torch.is_grad_enabled())
        return x + F.dropout(torch.tanh(self.linear(x)), 0.3)


class Drawing(Layer):
    def forward(self, x):
        return super().forward(x) * random.random() + numpy.random.random() * torch.rand_like(x)


class Averaging(Layer):
    """A buffer that a forward reads, and then writes to or replaces."""

    replaces = False

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))
        self.register_buffer("none", None)

    def forward(self, x):
        result = super().forward(x) * self.mean.clone()
        average = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        if self.replaces:
            self.mean = average
        else:
            self.mean.copy_(average)
        return result


class Replacing(Averaging):
    replaces = True


class Stateful(Layer):
    """Counts, remembers, and draws from generators of its own."""

    def __init__(self):
        super().__init__()
        self.steps, self.state = 0, torch.ones(WIDTH)
        self.streams = nn.Module()
        self.streams.torch, self.streams.python = torch.Generator().manual_seed(1), random.Random(1)
        self.streams.numpy = numpy.random.default_rng(1)

    def forward(self, x):
        self.steps += 1
        x = super().forward(x) * self.state / self.steps
        self.state = x.detach().sigmoid().mean(0)
        draws = self.streams.python.random() + self.streams.numpy.random()
        return x * torch.rand(WIDTH, generator=self.streams.torch) * draws + self.state


class Descending(Layer):
    """Runs a backward pass of its own, as models do that take forces from energies."""

    def forward(self, x):
        place = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.linear(place).tanh().square().sum(), place, create_graph=True)
        return super().forward(x) + slope


class Normed(Layer):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)

    def forward(self, x):
        return self.norm(super().forward(x))


class Spectral(Layer):
    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.linear)


class Checkpointed(Layer):
    reentrant = False

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


SEGMENTS = {"each": None, "pairs": [0, 0, 2, 2, 4], "all": [0] * 5, "some": [None, 1, 1, None, 4]}


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize(
    "layer",
    [Layer, Drawing, Averaging, Replacing, Stateful, Descending, Normed, Spectral, Checkpointed, Reentrant],
    ids=lambda c: c.__name__,
)
def test_every_bit_is_that_of_the_run_that_keeps_everything(layer, segments):
    check_same(lambda: Net(layer() for _ in range(5)), segments=SEGMENTS[segments])


@pytest.mark.parametrize("layer", [Layer, Normed, Drawing], ids=lambda c: c.__name__)
def test_with_kept_products_too(layer):
    check_same(lambda: Net(layer() for _ in range(5)), contexts=Selective())


def test_a_first_layer_may_take_integers():
    check_same(
        lambda: Net([nn.Embedding(9, WIDTH), Layer(), Layer()]), torch.arange(9).reshape(3, 3), segments=[0, 0, 2]
    )


class Between(Net):
    """Skips over blocks, a mask for all, results that are changed between blocks, in place too, and keywords."""

    def forward(self, x):
        mask, skip = torch.rand(len(x), 1), x
        for index, block in enumerate(self.blocks):
            x = block(x, mask=mask, skips=[skip])
            if index == 1:
                x = x * 2
            if index == 2:
                x.mul_(3)
            if index == 3:
                x, skip = skip, x
        return x


class Masked(Layer):
    def forward(self, x, *, mask, skips):
        return super().forward(x) * mask + skips[0]


@pytest.mark.parametrize("segments", SEGMENTS)
def test_code_between_the_blocks_may_do_what_it_likes(segments):
    check_same(lambda: Between(Masked() for _ in range(5)), segments=SEGMENTS[segments])


def test_autocast_stands_in_the_repetition_as_it_did():
    class Cast(Net):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    check_same(lambda: Cast(Layer() for _ in range(5)), segments=SEGMENTS["pairs"])


class Carrier:
    """What blocks read and change."""


def test_objects_among_the_arguments_are_found_as_they_were():
    class Carrying(Layer):
        def forward(self, carrier):
            carrier.x = super().forward(carrier.x) * carrier.scale
            return carrier

    class Through(Net):
        def forward(self, x):
            carrier = Carrier()
            carrier.x, carrier.scale = x, 1.0
            for block in self.blocks:
                carrier = block(carrier)
                carrier.scale += 0.5
            return carrier.x

    for segments in SEGMENTS.values():
        check_same(lambda: Through(Carrying() for _ in range(5)), segments=segments)


def test_new_tensors_have_the_type_that_they_had():
    class Scaled(Layer):
        def forward(self, x):
            return super().forward(x) * torch.tensor(0.3).cos() * torch.tensor(0.1)

    class True16(Net):
        def forward(self, x):
            torch.set_default_dtype(torch.bfloat16)
            try:
                return super().forward(x)
            finally:
                torch.set_default_dtype(torch.float32)

    check_same(lambda: True16(Scaled() for _ in range(5)).bfloat16(), torch.randn(5, WIDTH).bfloat16())


@pytest.mark.parametrize("training", [True, False])
def test_modes_are_those_of_the_forward_and_state_is_left_as_it_is(training):
    found = []
    for wrap in (lambda net: net, lambda net: recomputed(net, [0, 0])):
        torch.manual_seed(0)
        net = wrap(Net([Normed(), Stateful()])).train(training)
        loss = net(torch.randn(5, WIDTH)).square().sum()
        net.train(not training)
        block, state = net.blocks[1], net.blocks[1].state
        loss.backward()
        assert block.state is state
        assert (block.steps, block.training) == (1, not training)
        found.append([*(p.grad for p in net.parameters()), *net.buffers()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


class Outer(Layer):
    """A part of it is sharded for itself."""

    def __init__(self):
        super().__init__()
        self.part = Layer()

    def forward(self, x):
        return super().forward(self.part(x)).sin() @ self.linear.weight


def sharded(net):
    mesh = init_device_mesh("cpu", (1,))
    for block in net.blocks:
        fully_shard(block.part, mesh=mesh)
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_units_within_a_sharded_block_leave_it_whole_for_its_backward_pass(alone):
    found = []
    selective = partial(recomputed, contexts=Selective())
    for wrap in (lambda net: net, recomputed, lambda net: recomputed(net, [0, 0, 2]), selective):
        torch.manual_seed(0)
        net = wrap(sharded(Net(Outer() for _ in range(3))))
        net(torch.ones(5, WIDTH)).square().sum().backward()
        found.append([p.grad.to_local() for p in net.parameters()])
    torch.testing.assert_close(found[1:], found[:1] * 3, rtol=0, atol=0)


def kept_bytes(net, x):
    """Bytes of arguments of frames that hooks outside see, and whatever else is saved."""
    seen = {}

    def pack(tensor):
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return keep(tensor)

    parameters = {p.untyped_storage().data_ptr() for p in net.parameters()}
    with ChainedHooks(pack):
        result = net(x)
    return sum(size for key, size in seen.items() if key not in parameters), result


def test_a_segment_keeps_its_first_argument_alone_and_runs_once_more():
    x = torch.randn(5, WIDTH)
    size = x.numel() * x.element_size()
    for segments, number in ((None, 5), ([0, 0, 2, 2, 4], 3), ([0] * 5, 1)):
        net = recomputed(Net(Layer() for _ in range(5)), segments)
        kept, result = kept_bytes(net, x.requires_grad_())
        assert kept == number * size
        result.sum().backward()
        assert [len(block.calls) for block in net.blocks] == [2] * 5
    plain = Net(Layer() for _ in range(5))
    assert kept_bytes(plain, x)[0] > 10 * size


def test_a_repetition_ends_with_the_last_tensor_that_is_needed():
    class Two(nn.Sequential):
        def forward(self, x):
            return super().forward(x).sum() + x

    counted = []
    net = recomputed(Net([Two(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Identity())]))
    for index, module in enumerate(net.blocks[0]):
        module.register_forward_hook(lambda *_, index=index: counted.append(index))
    net(torch.randn(3, WIDTH)).sum().backward()
    assert counted == [0, 1, 2, 3, 0, 1]  # the second linear layer needs no result


def test_a_graph_may_be_used_twice_and_differentiated_twice():
    def penalty(net, x):
        net.zero_grad(set_to_none=True)
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        return [x.grad, *(p.grad for p in net.parameters())]

    found = []
    x = torch.randn(5, WIDTH)
    for wrap in (lambda net: net, lambda net: recomputed(net, SEGMENTS["pairs"])):
        torch.manual_seed(0)
        net = wrap(Net(Layer() for _ in range(5)))
        result = net(x).square().sum()
        result.backward(retain_graph=True)
        result.backward()
        found.append(([p.grad.clone() for p in net.parameters()], penalty(net, x)))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_nothing_is_kept_without_gradients_and_a_frozen_block_works():
    net = recomputed(Net(Layer() for _ in range(3)))
    with torch.no_grad():
        net(torch.randn(2, WIDTH))
    assert [len(block.calls) for block in net.blocks] == [1] * 3
    net.requires_grad_(False)
    net.blocks[2].requires_grad_(True)
    net(torch.randn(2, WIDTH)).sum().backward()
    assert [len(block.calls) for block in net.blocks] == [2, 2, 3]


class Counting(Layer):
    def forward(self, x):
        result = super().forward(x)
        return result.exp() if len(self.calls) > 1 else result


class Wider(Layer):
    def forward(self, x):
        return super().forward(x.repeat(len(self.calls) + 1, 1)).sum() + x


class Writing(Layer):
    def forward(self, x):
        return super().forward(x.mul_(2))


class Shrinking(Counting):
    def forward(self, x):
        result = Layer.forward(self, x)
        return result if len(self.calls) > 1 else result.exp()


class Late(Averaging):
    def forward(self, x):
        if self.calls:
            return super().forward(x)
        return Layer.forward(self, x)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Counting, r"blocks.0 saves more tensors for backward when its forward is repeated"),
        (Shrinking, r"blocks.0 saves fewer tensors for backward when its forward is repeated"),
        (Wider, r"blocks.0 saves \[10, 6\] torch.float32 in place of another tensor"),
        (Writing, r"blocks.0 writes to its argument of shape \[5, 6\] in place"),
    ],
)
def test_what_cannot_be_repeated_is_an_error_that_names_the_block(layer, message):
    net = recomputed(Net([layer(), Layer()]), [0, 0])
    x = torch.randn(5, WIDTH, requires_grad=True) * 1
    with pytest.raises(RuntimeError, match=message):
        net(x).sum().backward()


class Rectified(Layer):
    def forward(self, x):
        return self.linear(x).relu_()


class Gated(Layer):
    def __init__(self):
        super().__init__()
        self.gates = nn.GRU(WIDTH, WIDTH)

    def forward(self, x):
        return self.gates(x)[0]


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Rectified, r"blocks.1, with policy='selective': .* mutated. Nobody may write to kept results in place"),
        (Layer, r"blocks.1, with policy='selective': .* backward an extra time.*a graph runs backward once"),
        (Gated, r"A block calls aten.unsafe_split, as nn.GRU and nn.LSTM do on CPUs"),
    ],
)
def test_what_kept_products_cannot_do_is_an_error_with_a_way_out(layer, message):
    net = recomputed(Net([layer(), layer()]), contexts=Selective())

    def run():
        loss = net(torch.randn(5, WIDTH)).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    with pytest.raises(RuntimeError, match=message):
        run()


def test_a_buffer_that_changes_late_is_an_error():
    net = recomputed(Net([Late()]))
    x = torch.randn(5, WIDTH)
    net(x)
    with pytest.raises(RuntimeError, match=r"buffer mean of blocks.0 has changed for the first time after"):
        net(x)


class Cached(Net):
    """As in transformers: all blocks are given a cache, which each fills for itself."""

    def forward(self, x):
        cache = DynamicCache()
        if self.prefix is not None:
            cache.update(self.prefix, self.prefix, 0)
        for block in self.blocks:
            x = block(x, cache=cache, use_cache=True)
        return x

    prefix = None


class Caching(Layer):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x, cache, use_cache):
        keys, values = cache.update(x[None, None], 2 * x[None, None], self.number)
        return super().forward((keys + values)[0, 0])


@pytest.mark.parametrize("segments", SEGMENTS)
def test_an_empty_cache_of_keys_and_values_is_found_empty_again(segments):
    check_same(lambda: Cached(Caching(number) for number in range(5)), segments=SEGMENTS[segments])


def test_a_cache_with_a_prefix_is_refused():
    net = recomputed(Cached(Caching(number) for number in range(2)))
    net.prefix = torch.zeros(1, 1, 5, WIDTH)
    with pytest.raises(RuntimeError, match="given a DynamicCache with keys and values in it, such as a prefix"):
        net(torch.randn(5, WIDTH))


def test_a_cache_that_a_second_pass_goes_on_from_is_refused():
    class Again(Cached):
        def forward(self, x):
            cache = DynamicCache()
            for block in (*self.blocks, *self.blocks):
                x = block(x, cache=cache, use_cache=True)
            return x

    net = recomputed(Again(Caching(number) for number in range(2)))
    with pytest.raises(RuntimeError, match=r"blocks.0 is given a DynamicCache for the second time"):
        net(torch.randn(5, WIDTH))
