"""Saved tensors in host memory: what moves and how often, how much is on the device, and that no number changes."""

import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.functional.offloading import cheapest_offload, smallest_offload_budget
from lightning_hybrid.parallel.ledgers import fates
from lightning_hybrid.parallel.memory.offload import Offload
from lightning_hybrid.parallel.memory.offload_copies import Copies, Geometry, HostPool, all_bytes
from lightning_hybrid.parallel.memory.passes import begin_pass

WIDTH, BATCH = 8, 4


class Block(nn.Module):
    """Saves its input twice, views of one projection, and a mask."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return x + F.dropout(self.out(mixed), 0.2)


class Net(nn.Module):
    def __init__(self, depth=5, block=Block):
        super().__init__()
        torch.manual_seed(1)
        self.inlet, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x):
        x = self.inlet(x).tanh()
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class Tally:
    """Bytes that are on the device and on the host, as announced, and whether memory was given up in truth."""

    def __init__(self):
        self.now, self.peak, self.announced = {}, {}, {}
        self.released = []

    def announced_(self, tensor, fate, earlier):
        storage = tensor.untyped_storage()
        number = storage.nbytes()
        self.now[fate] = self.now.get(fate, 0) + number
        self.peak[fate] = max(self.peak.get(fate, 0), self.now[fate])
        self.announced.setdefault(fate, []).append(number)
        weak = StorageWeakRef(storage)

        def release():
            self.now[fate] -= number
            self.released.append((fate, weak))

        return release


class Observer:
    def __init__(self, tally):
        self.announced = tally.announced_


class Gated(nn.Module):
    """Writes to chunks of one storage that count their writes each for themselves."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.gates = nn.GRU(width, width, batch_first=True)

    def forward(self, x):
        return x + self.gates(x)[0]


@pytest.fixture
def tally():
    tally = Tally()
    observer = Observer(tally)
    fates.observers.append(observer)
    yield tally
    fates.observers.remove(observer)


class Session:
    """A batch with offloading."""

    def __init__(self, net, blocks=None, policy="all", min_bytes=0):
        names = {f"blocks.{i}": block for i, block in enumerate(net.blocks)} if blocks is None else blocks
        self.offload = Offload(net, names, torch.device("cpu"), policy, min_bytes)

    def __enter__(self):
        self.offload.start()
        return self.offload

    def __exit__(self, *exception):
        self.offload.close()


def gradients(net, x, run=None):
    net.zero_grad()
    torch.manual_seed(7)
    loss = net(x) if run is None else run(net, x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


def assert_bitwise(found, expected):
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def inputs():
    return torch.rand(BATCH, 6, WIDTH, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("block", [Block, Gated])
def test_gradients_are_bitwise_those_of_a_plain_run_and_all_memory_is_given_up(block, tally):
    net, x = Net(block=block), inputs()
    expected = gradients(net, x)
    with Session(net) as offload:
        assert_bitwise(gradients(net, x), expected)
        made = offload.copies.pool.num_made
        assert_bitwise(gradients(net, x), expected)
        assert offload.copies.pool.num_made == made  # the second step uses the first one's buffers
    assert tally.now == {"kept": 0, "offloaded": 0}
    alive = {weak.cdata for fate, weak in tally.released if fate == "kept" and not weak.expired()}
    assert alive == {x.untyped_storage()._cdata}
    assert not vars(net.blocks[0]).get("forward")


def test_the_device_holds_two_blocks_and_what_lies_between_whatever_the_depth(tally):
    peaks = []
    for depth in (4, 9):
        net = Net(depth)
        tally.now, tally.peak, tally.announced = {}, {}, {}
        with Session(net) as offload:
            gradients(net, inputs())
        sizes = list(offload.sizes.values())
        block = offload.sizes["blocks.1"]
        assert list(offload.sizes)[1:-1] == [f"blocks.{i}" for i in range(depth)]
        assert all(offload.sizes[f"blocks.{i}"] == block for i in range(1, depth))
        assert tally.peak["kept"] <= max(2 * block, block + sizes[0], block + sizes[-1])
        assert tally.peak["offloaded"] == sum(sizes) - inputs().nbytes  # the first block saves what tanh has saved
        peaks.append(tally.peak["kept"])
    assert peaks[0] == peaks[1]


def test_a_storage_is_copied_once_for_all_operations_and_views(tally):
    projection = nn.Linear(WIDTH, 3 * WIDTH)

    def run(net, x):
        q, k, v = net(x).chunk(3, dim=-1)
        mixed = (q @ k.mT) @ v  # saves all three, two of them transposed as well
        return (mixed * v.expand_as(mixed) * q[..., :1]).sum()

    x = inputs()
    expected = gradients(projection, x, run)
    with Session(projection, {}) as offload:
        assert_bitwise(gradients(projection, x, run), expected)
        sizes = offload.sizes
    product = BATCH * 6 * 6 * 4
    copied = sorted(tally.announced["offloaded"])
    whole, rows = 3 * x.nbytes, x.nbytes
    assert copied.count(whole) == 1
    assert copied == sorted([whole, rows, product, rows, rows])  # the projection; its input; q k; twice in the product
    assert sizes == {"(before blocks)": sum(copied)}


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x[1:, ::2],
        lambda x: x[:1].expand(3, 4),
        lambda x: x.to(torch.bfloat16),
        lambda x: torch.complex(x, x).conj(),
        lambda x: torch.complex(x, x).conj().imag,
        lambda x: x[2, 1],
        lambda x: x.as_strided((2, 2), (3, 1), 2),
        lambda x: x > 0,
    ],
)
def test_views_are_rebuilt_as_they_were(make):
    tensor = make(torch.rand(4, 4))
    storage = all_bytes(tensor.untyped_storage()).clone().untyped_storage()
    other = Geometry.of(tensor).view(storage)
    assert torch.equal(other, tensor)
    for read in ("stride", "storage_offset", "is_conj", "is_neg"):
        assert getattr(other, read)() == getattr(tensor, read)()
    assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape)


def test_parameters_buffers_small_and_other_tensors_stay(tally):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.weight = nn.BatchNorm1d(WIDTH), nn.Parameter(torch.rand(WIDTH, WIDTH))
            self.register_buffer("scale", torch.rand(BATCH, WIDTH))

        def forward(self, x):
            small = x[:1, :1] * self.weight.sum()
            sparse = torch.sparse.mm(torch.eye(BATCH).to_sparse(), x @ self.weight.t())
            return (self.norm(sparse) * self.scale).exp().sum() * small.exp().sum()

    net, x = Odd(), torch.rand(BATCH, WIDTH)
    plain = copy.deepcopy(net)
    expected = gradients(plain, x)
    with Session(net, {}, min_bytes=WIDTH * 4 + 1):
        assert_bitwise(gradients(net, x), expected)
    size = x.nbytes
    # x, what the norm gets, and what exp gives: neither weights nor the buffer nor the norm's statistics
    assert tally.announced["offloaded"] == [size] * 3
    assert torch.equal(net.norm.running_var, plain.norm.running_var)


def test_a_write_while_the_copy_is_held_is_the_error_that_autograd_makes(tally):
    net, x = Net(2), inputs()

    def run(net, x):
        y = net.inlet(x).exp()
        y.mul_(2)
        return net.blocks[0](y).sum()

    with Session(net):
        loss = run(net, x)
        with pytest.raises(RuntimeError, match=r"modified in place, 1 time"):
            loss.backward()
    with Session(net):
        y = net.inlet(x).exp()
        z = net.blocks[1](net.blocks[0](y))  # the copy is done
        y.data.zero_()
        z.sum().backward()


def test_a_graph_can_run_backward_twice_and_three_times():
    net, x = Net(3), inputs()

    def thrice(net, x):
        loss = net(x)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        return loss

    expected = gradients(net, x, thrice)
    with Session(net):
        assert_bitwise(gradients(net, x, thrice), expected)
        loss = net(x)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_a_gradient_of_a_gradient_is_the_same(tally):
    net, x = Net(2), inputs().requires_grad_()

    def penalty(net, x):
        (slope,) = torch.autograd.grad(net(x), x, create_graph=True)
        return slope.square().sum()

    expected = gradients(net, x, penalty)
    with Session(net):
        assert_bitwise(gradients(net, x, penalty), expected)
    assert tally.now == {"kept": 0, "offloaded": 0}


class Checkpointed(Block):
    reentrant = False

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


@pytest.mark.parametrize("block", [Checkpointed, Reentrant])
def test_checkpoints_of_the_user_keep_their_inputs_on_the_host(block, tally):
    net, x = Net(3, block), inputs()
    expected = gradients(net, x)
    with Session(net) as offload:
        assert_bitwise(gradients(net, x), expected)
    assert [offload.sizes[f"blocks.{i}"] for i in range(3)] == [x.nbytes] * 3


def test_blocks_alone_move_what_they_save():
    net, x = Net(3), inputs()
    expected = gradients(net, x)
    with Session(net, policy="blocks") as offload:
        assert_bitwise(gradients(net, x), expected)
    assert list(offload.sizes) == ["blocks.0", "blocks.1", "blocks.2"]


def test_convolutions_move_their_inputs_whoever_saved_them_first(tally):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.Tanh()
    )
    x = torch.rand(2, 2, 5, 5)
    net2, sums = copy.deepcopy(net), lambda net, x: net(x).sum()
    expected = gradients(net2, x, sums)
    with Session(net, dict(net.named_children()), "conv"):
        torch.manual_seed(7)
        loss = net(x).sum()
        hidden = 2 * 3 * 5 * 5 * 4
        assert tally.announced["offloaded"] == [x.nbytes, hidden]
        statistics = 2 * (3 + 2) * 4
        # inputs of both norms, and what tanh gave: neither of what the activation in the middle gave
        assert tally.now["kept"] == hidden + 2 * (2 * 2 * 3 * 3 * 4) + statistics
        loss.backward()
    assert_bitwise([loss.detach(), *(p.grad for p in net.parameters())], expected)


def test_passes_that_are_interleaved_fetch_nothing_of_each_other(tally):
    net, x = Net(4), inputs()
    expected = gradients(net, x, lambda net, x: sum(net(part) for part in x.split(1)))
    net.zero_grad()
    with Session(net) as offload:
        torch.manual_seed(7)
        losses, parts = [], list(x.split(1))
        order = ["F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3"]
        peaks = []
        for action in order:
            number = int(action[1])
            tally.peak["kept"] = tally.now.get("kept", 0)
            if action[0] == "F":
                begin_pass()
                losses.append(net(parts[number]))
            else:
                losses[number].backward()
            peaks.append(tally.peak["kept"])
    sizes = list(offload.sizes.values())
    assert offload.in_flight == 3
    assert max(peaks) <= 2 * max(sizes)
    total = sum(loss.detach() for loss in losses)
    assert torch.equal(total, expected[0])
    for found, wanted in zip((p.grad for p in net.parameters()), expected[1:], strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_probe_moves_nothing(tally):
    net = Net(2)
    with Session(net):
        begin_pass(trained=False)
        net(inputs()).backward()
        assert not tally.announced
        begin_pass()
        net(inputs())
        assert tally.announced


def test_a_plan_names_groups_that_stay(tally):
    net, x = Net(3), inputs()
    expected = gradients(net, x)
    with Session(net) as offload:
        offload.plan = {"blocks.2": False, "(after blocks.2)": False}
        assert_bitwise(gradients(net, x), expected)
    assert list(offload.sizes) == ["(before blocks)", "blocks.0", "blocks.1"]


def test_the_pool_keeps_what_a_step_needed():
    pool = HostPool(pinned=False)
    first, second = pool.take(8), pool.take(8)
    pool.give_back(first)
    pool.give_back(second)
    pool.trim()
    assert {pool.take(8).data_ptr()} < {first.data_ptr(), second.data_ptr()}
    pool.trim()
    pool.trim()  # one of them was not needed since
    pool.take(8)
    pool.take(8)
    assert pool.num_made == 4


class Delayed(Copies):
    """Copies that are done when somebody waits for them, in order, as on a stream of their own at the latest."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.waiting, self.num_done = [], 0

    def to_device(self, buffer):
        target, event = super().to_device(buffer)
        target.fill_(255)  # what is used too early is wrong: not-a-number, or true
        return target, event

    def _copy(self, source, target):
        self.waiting.append([weakref.ref(source), weakref.ref(target)])
        return self.num_done + len(self.waiting)

    def wait(self, event):
        while event is not None and self.num_done < event:
            source, target = (reference() for reference in self.waiting.pop(0))
            assert source is not None, "what was to be copied was freed before"
            assert target is not None, "where it was to go was freed before"
            target.copy_(source)
            self.num_done += 1


def test_nothing_is_used_or_freed_before_a_copy_that_takes_its_time_is_done():
    net, x = Net(4), inputs()
    expected = gradients(net, x)
    session = Session(net)
    session.offload.copies = delayed = Delayed()
    with session:
        for _ in range(2):
            torch.manual_seed(7)
            loss = net(x)
            assert delayed.waiting  # the last blocks are on their way, and the others were waited for
            assert delayed.num_done
            net.zero_grad()
            loss.backward()
            assert_bitwise([loss.detach(), *(p.grad for p in net.parameters())], expected)
        del loss
    for partial in (lambda: net(x), lambda: torch.autograd.grad(net(x), net.head.weight)):
        with Session(net) as offload:
            offload.copies = Delayed()
            partial()  # graphs that end in the middle
            assert offload.copies.num_done


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # by torch.func.jvp
def test_transforms_within_a_step_work_or_are_refused_by_torch():
    net, x = Net(2), inputs()

    def mapped(net, x):
        return torch.vmap(lambda row: net.inlet(row).tanh().exp().sum())(x).sum()

    def forward_mode(net, x):
        value, slope = torch.func.jvp(net, (x,), (x,))
        return value + slope

    for run in (mapped, forward_mode):
        expected = gradients(net, x, run)
        with Session(net):
            assert_bitwise(gradients(net, x, run), expected)
    with Session(net), pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(lambda x: x.exp().sum())(x)


def test_a_plan_under_a_budget_holds_no_more_than_it(tally):
    net, x = Net(5), inputs()
    expected = gradients(net, x)
    with Session(net) as offload:
        gradients(net, x)
    names, sizes = list(offload.sizes), list(offload.sizes.values())
    moved = []
    for budget in (smallest_offload_budget(sizes), sum(sizes) * 2 // 3, sum(sizes)):
        plan = cheapest_offload(sizes, budget)
        tally.now, tally.peak, tally.announced = {}, {}, {}
        with Session(net) as offload:
            offload.plan = dict(zip(names, plan, strict=True))
            assert_bitwise(gradients(net, x), expected)
        assert tally.peak["kept"] <= budget
        moved.append(sum(tally.announced.get("offloaded", [])))
    assert moved[0] > moved[1] > moved[2] == 0
