"""Parameters that stream through buffers: the same bits, in bounded memory, and no stale numbers."""

import copy
import math
import pickle
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_hybrid.compat import storage_key
from lightning_hybrid.optim import OptimizerTransition, linear_schedule
from lightning_hybrid.parallel.memory import parameters
from lightning_hybrid.parallel.memory.calls import Order, surround
from lightning_hybrid.parallel.memory.parameters import ParameterStreaming
from lightning_hybrid.parallel.memory.parameters_host import HostParameters, StrayReads, move, move_states
from lightning_hybrid.parallel.memory.parameters_order import AccessOrder
from lightning_hybrid.parallel.memory.parameters_transfers import Transfers

WIDTH, DEPTH = 8, 5
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.grow, self.shrink = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        return x + self.scale * F.dropout(self.shrink(F.gelu(self.grow(self.norm(x)))), 0.1, self.training)


class Model(nn.Module):
    """What tests are about is a subclass, with another `run`."""

    block = Block

    def __init__(self, tie=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 16, bias=False)
        self.shift = nn.Parameter(torch.rand(WIDTH))
        self.blocks = nn.ModuleList(self.block() for _ in range(DEPTH))
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, text):
        x = self.embed(text) + self.shift
        return F.cross_entropy(self.head(self.run(x)).flatten(0, 1), text.flatten())

    def run(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@contextmanager
def streaming(model, num_buffers=2, **keywords):
    found = ParameterStreaming(model, [f"blocks.{i}" for i in range(DEPTH)], CPU, num_buffers, **keywords)
    try:
        yield found
    finally:
        found.remove()


def train(model, stream, steps=3, between=lambda model, step: None, accumulate=1, num_buffers=2):
    """Losses and weights, and what has been counted in each step."""
    optimizer, losses, counts = torch.optim.AdamW(model.parameters(), 1e-2), [], []
    torch.manual_seed(1)
    with streaming(model, num_buffers) if stream else contextmanager(lambda: (yield))() as streamed:
        for step in range(steps):
            if streamed is not None:
                before = copy.copy(streamed.counts)
                streamed.begin("train")
            loss = model(torch.randint(16, (2, 4)))
            loss.backward()
            losses.append(loss.item())
            if step % accumulate == accumulate - 1:
                optimizer.step()
                optimizer.zero_grad()
            if streamed is not None:
                streamed.end()
                counts.append({name: n - getattr(before, name) for name, n in vars(streamed.counts).items()})
            between(model, step)
    return losses, model.state_dict(), counts


def check(make, **options):
    expected, found = train(make(), False, **options), train(make(), True, **options)
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())
    return found[2]


@pytest.mark.parametrize("number", [2, 3, 7])
def test_training_has_the_same_bits_in_the_memory_of_the_buffers(number):
    counts = check(lambda: Model(), num_buffers=number)
    with streaming(Model(), number) as streamed:
        largest = max(unit.num_bytes for unit in streamed.units)
        assert streamed.buffers.num_bytes == number * largest
        assert [parameter.shape for parameter in streamed.resident] == [(WIDTH,)]
        assert streamed.device_bytes == number * largest + 4 * WIDTH
    # forward: embed, blocks, head; backward: the blocks again. What the buffers still have is a hit.
    accesses = DEPTH + 2 + DEPTH
    hits = min(number - 1, DEPTH)
    assert counts[0] | {"fetches": accesses - hits, "waits": accesses - hits} == counts[0]
    for steady in counts[1:]:
        assert steady == {
            "accesses": accesses,
            "hits": hits,
            "prefetched": accesses - hits - 1,
            "fetches": accesses - hits,
            "waits": 1,  # for the first
        }


def test_accumulated_gradients_and_tied_weights():
    check(lambda: Model(tie=True), steps=4, accumulate=2)


def test_frozen_and_thawed_parameters():
    def between(model, step):
        model.blocks[step].grow.weight.requires_grad_(step % 2 == 1)
        model.embed.weight.requires_grad_(step % 2 == 1)

    check(Model, between=between)


def test_another_order_is_never_wrong_and_is_learnt():
    class Skipping(Model):
        orders = ((0, 1, 2, 3, 4), (0, 1, 2, 3, 4), (4, 1, 0, 3), (4, 1, 0, 3), (2, 2, 4), (2, 2, 4))
        calls = 0

        def run(self, x):
            for index in self.orders[self.calls]:
                x = self.blocks[index](x)
            self.calls += 1
            return x

    counts = check(Skipping, steps=6)
    assert [step["waits"] == 1 for step in counts] == [False, True, False, True, False, True]


def test_evaluation_streams_in_its_own_order_and_leaves_that_of_training_alone():
    model = Model().eval()
    text = torch.randint(16, (2, 4))
    expected = model(text)
    with streaming(model) as streamed:
        for kind in ("validate", "train", "validate", "train"):
            streamed.begin(kind)
            with torch.inference_mode(kind == "validate"):
                loss = model(text)
            assert torch.equal(loss, expected)
            if kind == "train":
                loss.backward()
        assert streamed.counts.waits == 7 + 11 + 2  # of first iterations all, of others the first unit


def test_what_is_written_before_the_first_unit_runs_is_seen():
    class Clipped(Model):
        def forward(self, text):
            for parameter in self.parameters():
                parameter.data.clamp_(-0.1, 0.1)
            return super().forward(text)

    check(Clipped)


def test_what_is_written_between_steps_is_seen_however_it_is_written():
    def between(model, step):
        with torch.no_grad():
            model.blocks[0].grow.weight.mul_(0.9)
        model.blocks[4].norm.bias.data.add_(1)
        model.head.weight.data = model.head.weight.data.clone() * 2

    check(Model, between=between)


def test_a_write_within_a_step_is_seen_and_makes_a_backward_pass_fail_as_without():
    for stream in (False, True):
        model, text = Model().eval(), torch.randint(16, (2, 4))
        with streaming(model) if stream else contextmanager(lambda: (yield))():
            loss = model(text)
            with torch.no_grad():
                model.blocks[3].shrink.weight.add_(1)
            changed = model(text)
            assert not torch.equal(loss, changed)
            with pytest.raises(RuntimeError, match=r"modified (in place|by an inplace)"):
                loss.backward()
            changed.backward()


def test_writes_of_a_unit_to_its_own_parameters_stay():
    def make():
        model = Model()
        model.embed.max_norm = 0.5
        return model

    check(make)


class Around(Model):
    reentrant = False

    def run(self, x):
        for first in range(0, DEPTH, 2):
            x = checkpoint(self.some, first, x, use_reentrant=self.reentrant)
        return x

    def some(self, first, x):
        for block in self.blocks[first : first + 2]:
            x = block(x)
        return x


class AroundReentrant(Around):
    reentrant = True


class Selective(Model):
    class block(Block):
        def __init__(self):
            super().__init__()
            self.grow.weight.data = self.grow.weight.data.t().contiguous().t()

    def run(self, x):
        kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=kept)
        return x


class Within(Block):
    def forward(self, x):
        return x + checkpoint(self.inner, x, use_reentrant=False)

    def inner(self, x):
        return self.shrink(F.gelu(checkpoint(self.grow, self.norm(x), use_reentrant=False)))


class Inside(Model):
    block = Within


class Parts(Model):
    """Calls parts of blocks, and reads parameters past calls."""

    def run(self, x):
        for block in self.blocks:
            x = x + block.shrink(checkpoint(block.grow, block.norm(x), use_reentrant=False)) * block.scale
        return F.linear(x, self.blocks[0].grow.weight[:WIDTH])


class Nested(Model):
    """A block that calls what lies beside it, and one that is called by another's child."""

    def run(self, x):
        self.blocks[0].grow.register_forward_hook(lambda module, args, output: output + self.head(args[0])[..., :1])
        return super().run(x)


class Recurrent(Model):
    class block(nn.LSTM):
        def __init__(self):
            super().__init__(WIDTH, WIDTH, batch_first=True)

        def forward(self, x):
            return super().forward(x)[0]


class Strided(Block):
    """Parameters of other types, strides, and sizes."""

    def __init__(self):
        super().__init__()
        self.strided = nn.Parameter(torch.rand(3, WIDTH).t())
        self.wide, self.scalar = nn.Parameter(torch.rand(3).double()), nn.Parameter(torch.tensor(0.5))
        self.phase, self.nothing = nn.Parameter(torch.rand(2, dtype=torch.complex64)), nn.Parameter(torch.empty(0))
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        y = (x @ self.strided).double() @ self.wide
        return super().forward(x) * self.scalar + y.float()[..., None] + (self.phase * 1j).prod().real


class Odd(Model):
    block = Strided


@pytest.mark.parametrize(
    "make", [Around, AroundReentrant, Selective, Inside, Parts, Nested, Recurrent, Odd], ids=lambda make: make.__name__
)
def test_the_same_bits_where(make):
    check(make)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at inputs
def test_a_compiled_block():
    def make():
        model = Model()
        for block in model.blocks:
            block.compile(backend="aot_eager")
        return model

    check(make)


def test_what_would_outlive_its_buffer_is_an_error():
    class Leaking(Block):
        def forward(self, x):
            return super().forward(x), {"weight": self.grow.weight.t()}

    class Storing(Block):
        def forward(self, x):
            self.stored = self.grow.weight
            return super().forward(x)

    model = Model()
    model.blocks[1] = Leaking()
    with (
        streaming(model),
        pytest.raises(RuntimeError, match=r"blocks\.1 returns one of its parameters.*\[8, 16\].*clone"),
    ):
        model.run(torch.rand(2, WIDTH))
    model = Model()
    model.blocks = nn.ModuleList(Storing() for _ in range(DEPTH))
    with streaming(model), pytest.raises(RuntimeError, match=r"blocks\.2 needs a buffer, and all 2 are in use, by"):
        model.run(torch.rand(2, WIDTH))


def test_within_recomputation_and_hooks_of_others():
    """Layers of recomputation are outside; what is left of saved tensors goes to the hooks around it all."""

    def make():
        model = Model()
        for block in model.blocks:
            surround(
                block, Order.RECOMPUTE, lambda proceed, args, kwargs: checkpoint(proceed, *args, use_reentrant=False)
            )
        return model

    counts = check(make)
    assert counts[1]["waits"] == 1
    with torch.autograd.graph.save_on_cpu():
        check(Model)


def test_a_double_backward_pass_has_the_numbers_or_says_why_not():
    def penalty(model):
        torch.manual_seed(0)
        x = torch.rand(2, WIDTH, requires_grad=True)
        (gradient,) = torch.autograd.grad(model.blocks[0](x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return [p.grad for p in model.blocks[0].parameters()]

    model, other = Model().eval(), Model().eval()
    with streaming(model):
        found = penalty(model)
        x = torch.rand(2, WIDTH, requires_grad=True)
        result = model.run(x).sum()
        with pytest.raises(RuntimeError, match="a double backward pass"):
            torch.autograd.grad(result, x, create_graph=True)
    for a, b in zip(found, penalty(other), strict=True):
        assert a is b is None or torch.equal(a, b)


def test_copies_are_plain_and_everything_is_given_back():
    model = Model()
    before = {name: storage_key(p) for name, p in model.named_parameters()}
    with streaming(model) as streamed:
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for other in copies:
            nn.init.zeros_(other.head.weight)
            assert other(torch.tensor([[1, 2]])).item() == pytest.approx(math.log(16))
        assert streamed.counts.accesses == 0
    assert {name: storage_key(p) for name, p in model.named_parameters()} == before
    assert not any("forward" in vars(module) for module in model.modules())


class Late(Transfers):
    """Copies are not done before computation waits for them."""

    def start(self, copies):
        return [copies]

    def wait(self, event):
        is_late = bool(event)
        for copies in event:
            with torch.no_grad():
                copies()
        event.clear()
        return is_late


def test_computation_waits_for_each_copy(monkeypatch):
    monkeypatch.setattr(parameters, "Transfers", Late)
    for step in check(Around):
        assert step["waits"] == step["fetches"] > 0


def test_a_model_without_units_is_refused():
    module = nn.Module()
    module.weight = nn.Parameter(torch.rand(3))
    with pytest.raises(ValueError, match="Module has no module with parameters that could be streamed"):
        ParameterStreaming(module, [], CPU, 2)


def test_a_module_moves_without_the_parameters_that_stay():
    model = Model()
    model.register_buffer("table", torch.rand(3))
    host = HostParameters(model)
    model.to("meta")
    assert model.table.is_meta
    host.resident.add(model.shift)
    kept, model.table = model.head.weight, torch.rand(3)
    model.double()
    assert model.head.weight is kept
    assert model.head.weight.dtype == model.shift.dtype == model.table.dtype == torch.float64
    other = copy.deepcopy(model)
    other.float()
    assert other.head.weight.dtype == torch.float32 != model.head.weight.dtype
    host.release()
    assert "_apply" not in vars(model)


def test_parameters_that_meet_tensors_of_the_device_are_brought_there_and_named():
    """The meta device stands for an accelerator."""
    model, x = Model(), torch.rand(2, WIDTH, device="meta")
    with StrayReads([model.head.weight, model.embed.weight, model.shift], torch.device("meta")) as reads:
        assert (x + model.shift).is_meta
        assert F.linear(x, model.head.weight[:3]).shape == (2, 3)
        assert not model.embed.weight.sum().is_meta
        F.linear(x, model.blocks[0].grow.weight)  # not among those; on meta, which computes nothing, no error
    assert [id(p) for p in reads.found] == [id(model.shift), id(model.head.weight)]


@pytest.mark.parametrize("prefix", ["", "first_"])
def test_states_lie_where_parameters_are(prefix):
    parameter = nn.Parameter(torch.rand(3))
    optimizer = torch.optim.Adam([parameter])
    if prefix:
        optimizer = OptimizerTransition(optimizer, torch.optim.SGD([parameter], 0.1), linear_schedule(1, 2))
    parameter.grad = torch.ones(3)
    optimizer.step()
    kept = parameter.data_ptr()
    move(parameter, CPU)
    assert parameter.data_ptr() == kept
    optimizer.state = {parameter.to("meta"): optimizer.state[parameter]}
    move_states([optimizer])
    ((_, state),) = optimizer.state.items()
    assert state[f"{prefix}exp_avg"].is_meta
    assert not state[f"{prefix}step"].is_meta


def test_orders_are_kept_by_kind_and_followed_from_where_they_fit():
    order = AccessOrder()
    order.begin("train")
    assert [order.note(unit) for unit in "abbc"] == [True, True, False, True]
    assert order.ahead(2) == ["c"]
    order.begin("validate")
    assert order.ahead(2) == []
    order.note("c")
    order.begin("train")
    assert order.ahead(2) == ["a", "b"]
    order.note("b")  # a was left out
    assert order.ahead(2) == ["b", "c"]
    order.note("x")
    assert order.ahead(3) == ["x", "c"]
    order.begin("train")
    assert order.ahead(3) == ["b", "x"]
