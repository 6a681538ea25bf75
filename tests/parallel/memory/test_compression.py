import copy
import gc
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.functional.codecs import ERROR_BOUNDS
from lightning_hybrid.parallel.ledgers import fates
from lightning_hybrid.parallel.memory import compressed as compressed_storages
from lightning_hybrid.parallel.memory import encoding, passes
from lightning_hybrid.parallel.memory.compressed import Compressed
from lightning_hybrid.parallel.memory.compression import LOOKS, Compression
from lightning_hybrid.parallel.memory.encoding import LOSSY, Codec

CPU = torch.device("cpu")


@contextmanager
def compressed(module, lossless=True, lossy=None, min_bytes=0):
    """What is saved here is compressed; `layers` is there behind it."""
    compression = Compression(module, CPU, Codec(lossless, lossy), min_bytes)
    compression.start()
    try:
        yield compression
    finally:
        compression.close()


class Of(nn.Module):
    """A module that runs a function, and has submodules."""

    def __init__(self, run, **children):
        super().__init__()
        self.run = run
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *inputs):
        return self.run(self, *inputs)


def convolution(inputs=3, outputs=4, kernel=3, **options):
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **options)


def gradients(model, x, lossless=True, lossy=None, on=True):
    """Of a step from fixed weights; with the codes of each layer."""
    model, x = copy.deepcopy(model), x.detach().clone().requires_grad_()
    torch.manual_seed(2)
    if not on:
        result = model(x)
        result.square().mean().backward()
        return [result, x.grad, *(p.grad for p in model.parameters())], {}
    with compressed(model, lossless, lossy) as compression:
        result = model(x)
        result.square().mean().backward()
    codes = {name: sorted(code for code in layer.after) for name, layer in compression.layers.items()}
    return [result, x.grad, *(p.grad for p in model.parameters())], codes


def assert_bitwise(found, expected):
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def skip(self, x):
    x = F.relu(self.first(x))
    return self.second(F.max_pool2d(x, 2)) + self.side(x)[:, :, ::2, ::2]


def branches(self, x):
    x = F.relu(self.first(x))
    return torch.cat([self.second(x), self.side(x), F.max_pool2d(x, 3, 1, 1)], 1)


PARTS = {"first": convolution(), "second": convolution(4), "side": convolution(4, 4, 1)}
NETS = {
    "relu, pool": (nn.Sequential(convolution(), nn.ReLU(), nn.MaxPool2d(3, 2, 1)), {"1": ["bits"], "2": ["argmax"]}),
    "in place": (nn.Sequential(convolution(), nn.ReLU(inplace=True), nn.MaxPool2d(2)), {"1": ["bits"]}),
    "relu alone": (nn.Sequential(convolution(), nn.ReLU(), nn.AdaptiveAvgPool2d(1)), {"1": ["bits"]}),
    "pool alone": (nn.Sequential(convolution(), nn.MaxPool2d(2)), {"1": ["argmax", "shape"]}),
    "relu, convolution": (nn.Sequential(convolution(), nn.ReLU(), convolution(4)), {"1": ["sparse"]}),
    "relu, linear": (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5)), {"1": ["sparse"]}),
    "skip": (Of(skip, **PARTS), {"": ["argmax", "sparse"]}),
    "branches": (Of(branches, **PARTS), {"": ["argmax", "sparse"]}),
    "dropout": (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.8), nn.Linear(8, 8)), {"1": ["sparse"], "2": ["sparse"]}),
    "dense": (nn.Sequential(convolution(), nn.Tanh(), convolution(4)), {"1": ["raw"]}),
    "negative": (nn.Sequential(convolution(), Of(lambda self, x: -x.abs()), nn.ReLU(), nn.MaxPool2d(2)), {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NETS)
def test_gradients_are_those_without(name, dtype):
    model, expected = NETS[name]
    model, x = copy.deepcopy(model).to(dtype), torch.randn(2, 3, 8, 8, dtype=dtype)
    found, codes = gradients(model, x)
    assert_bitwise(found, gradients(model, x, on=False)[0])
    assert all(set(of_layer) <= set(codes[layer]) for layer, of_layer in expected.items())


def test_channels_last():
    model = nn.Sequential(convolution(), nn.ReLU(), nn.MaxPool2d(2), convolution(4), nn.MaxPool2d(3, 2))
    model, x = model.to(memory_format=torch.channels_last), torch.randn(2, 3, 9, 8)
    x = x.contiguous(memory_format=torch.channels_last)
    found, codes = gradients(model, x)
    assert_bitwise(found, gradients(model, x, on=False)[0])
    assert codes["1"] == ["bits"]
    assert codes["4"] == ["argmax", "shape"]


def test_a_step_of_autocast_is_the_same():
    model, x = nn.Sequential(convolution(3, 8), nn.ReLU(), convolution(8, 8), nn.Tanh()), torch.randn(2, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert_bitwise(gradients(model, x)[0], gradients(model, x, on=False)[0])


def attention(self, x):
    return F.linear(self.layer(x, x.cos(), x.sin())[0], self.head.weight)


CAST = {
    "linear": nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 24)),
    "channels last": nn.Sequential(convolution(16, 8), nn.Tanh(), convolution(8)).to(memory_format=torch.channels_last),
    "weights of children, and rows of one": Of(attention, layer=nn.MultiheadAttention(16, 2), head=nn.Linear(16, 8)),
    "recurrent": Of(lambda self, x: self.layer(x)[0], layer=nn.GRU(16, 8, 2)),
}


@pytest.mark.parametrize("name", CAST)
def test_what_autocast_makes_of_weights_is_never_rounded(name, monkeypatch):
    rounded = []
    plain = encoding.codecs.encode_fp8
    monkeypatch.setattr(encoding.codecs, "encode_fp8", lambda flat: rounded.append(flat.float()) or plain(flat))
    model = nn.Sequential(Of(lambda self, x: x * 1), CAST[name])
    x = torch.randn(3, 16, 5, 7) if name == "channels last" else torch.randn(7, 5, 16)
    with compressed(model, lossy="fp8"):
        for _ in range(2):  # the cache of autocast holds copies until it ends
            with torch.autocast("cpu", torch.bfloat16):
                result = model(x.requires_grad_())
    assert result.requires_grad
    assert rounded
    copies = [part.detach().to(torch.bfloat16).float() for part in model.parameters() if part.ndim > 1]
    assert not any(torch.isin(flat, copy).all() for flat in rounded if flat.numel() for copy in copies)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_recurrent_layers_share_storages_that_count_writes_apart(kind):
    model = Of(lambda self, x: F.relu(self.layer(x)[0]), layer=kind(5, 6, 2))
    x = torch.randn(4, 3, 5)
    assert_bitwise(gradients(model, x)[0], gradients(model, x, on=False)[0])


def test_a_storage_is_encoded_once_and_decoded_once_for_all_its_readers(monkeypatch):
    decoded = []
    plain = encoding.codecs.decode_sparse
    monkeypatch.setattr(encoding.codecs, "decode_sparse", lambda rows: decoded.append(rows) or plain(rows))
    model = Of(branches, **PARTS)
    _, codes = gradients(model, torch.randn(2, 3, 8, 8))
    assert codes[""] == ["argmax", "raw", "sparse"]  # what the caller saves is kept
    assert len(decoded) == 1  # of the ReLU itself, two convolutions and the pool


def test_memory_goes_when_the_forward_pass_needs_it_no_more_and_again_in_backward():
    storages = []
    watch = Of(lambda self, x: storages.append(StorageWeakRef(x.untyped_storage())) or x)
    model = nn.Sequential(
        convolution(), nn.ReLU(), watch, nn.MaxPool2d(2), convolution(4), nn.ReLU(), watch, convolution(4)
    )
    with compressed(model):
        loss = model(torch.randn(2, 3, 8, 8)).square().mean()
        assert [storage.expired() for storage in storages] == [True, True]
        loss.backward(retain_graph=True)
        first = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        loss.backward()
    assert_bitwise([p.grad for p in model.parameters()], first)


def test_what_a_user_holds_stays_whole():
    model, held = nn.Sequential(convolution(), nn.ReLU(), Of(lambda self, x: held.append(x) or x), nn.MaxPool2d(2)), []
    with compressed(model) as compression:
        model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert compression.layers["1"].after == {"raw": 2 * 4 * 64 * 4}


def test_what_a_loop_holds_takes_no_more_time_for_each_turn_and_is_encoded_when_it_lets_go(monkeypatch):
    looks = []
    plain = Compressed.is_free
    monkeypatch.setattr(Compressed, "is_free", property(lambda stored: looks.append(0) or plain.fget(stored)))

    def loop(self, x):
        states = [x]
        for _ in range(200):
            states.append(F.relu(states[-1] + 1))
        counts.append(len(looks))
        del states[:-1]
        return self.last(states.pop())

    counts, model = [], nn.Sequential(nn.Linear(4, 4), Of(loop, last=nn.Linear(4, 4)), *[nn.ReLU()] * 10)
    with compressed(model) as compression:
        result = model(torch.randn(2, 4))
        assert counts[0] < 200 * LOOKS
        assert counts[0] < len(looks)
        assert len(compression._waiting) <= 2  # the last ones
        result.sum().backward()
    assert compression.layers["1"].after["bits"] == 199  # a byte each; the last is saved for a product, too


def test_a_write_in_place_is_refused_as_by_autograd():
    with compressed(nn.Linear(1, 1)):
        y = F.relu(torch.randn(9, requires_grad=True))
        z = y * 1
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified in place"):
            z.sum().backward() or y.sum().backward()


def test_gradients_of_gradients():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def second(x):
        x = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [*model.parameters()][:-1])

    x = torch.randn(4, 6)
    expected = second(x)
    with compressed(model):
        assert_bitwise(second(x), expected)


def test_probes_small_storages_and_validation_are_left_alone():
    model = nn.Sequential(convolution(), nn.ReLU(), nn.MaxPool2d(2))
    with compressed(model, min_bytes=2**20) as compression:
        model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert {code for layer in compression.layers.values() for code in layer.after} == {"raw"}
    with compressed(model) as compression:
        passes.begin_pass(trained=False)
        model(torch.randn(2, 3, 8, 8)).sum().backward()
        with torch.no_grad():
            model(torch.randn(2, 3, 8, 8))
    assert compression.layers == {}


def test_nothing_is_left_of_a_step():
    model = nn.Sequential(convolution(), nn.ReLU(), convolution(4), nn.ReLU(), nn.MaxPool2d(2))
    with compressed(model, lossy="fp10") as compression:
        result = model(torch.randn(2, 3, 8, 8))
        assert compression._table
        del result
        gc.collect()
        assert not compression._table
        compression._settle()
        assert not compression._waiting


@pytest.mark.parametrize("lossy", LOSSY)
def test_a_lossy_step_is_exact_forward_and_up_to_the_bound_backward(lossy):
    """Of convolutions, ReLUs and pools, gradients of inputs depend on weights and signs alone, which are exact."""
    model = nn.Sequential(convolution(), nn.ReLU(), convolution(4), nn.ReLU(), nn.MaxPool2d(2), convolution(4))
    x = 1e-6 + torch.randn(2, 3, 8, 8).mul(torch.logspace(-6, 1, 8))
    expected = gradients(model, x, on=False)[0]
    found, codes = gradients(model, x, lossy=lossy)
    assert any(lossy in code for code in codes["1"])
    assert_bitwise(found[:2], expected[:2])
    result, inputs = expected[0].detach(), [x]
    with torch.no_grad():
        for layer in model[:-1]:
            inputs.append(layer(inputs[-1]))
    weights = [gradient for gradient in found[2:] if gradient.ndim == 4]
    exact = [gradient for gradient in expected[2:] if gradient.ndim == 4]
    output = (2 * result / result.numel()).abs()
    last = torch.nn.grad.conv2d_weight(ERROR_BOUNDS[lossy].of(inputs[-1]), exact[-1].shape, output.double(), padding=1)
    off = (weights[-1] - exact[-1]).abs()
    rounding = 1e-6 * torch.nn.grad.conv2d_weight(
        inputs[-1].abs().double(), exact[-1].shape, output.double(), padding=1
    )
    assert (off <= last + rounding).all()
    assert off.any()
    assert not torch.equal(weights[1], exact[1])


@pytest.mark.parametrize("number", [1e9, float("inf"), float("nan")])
@pytest.mark.parametrize("lossy", LOSSY)
def test_a_tensor_with_a_number_that_the_format_has_not_stays_as_it_is(lossy, number):
    model, x = nn.Sequential(nn.Linear(8, 8), Of(lambda self, x: x * 1), nn.Linear(8, 8)), torch.randn(4, 8)
    model[0].bias.data[3] = number
    found, codes = gradients(model, x, lossy=lossy)
    assert codes["2"] == ["raw"]
    expected = gradients(model, x, on=False)[0]
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(found, expected, strict=True))


def test_losses_and_inputs_of_repeated_forwards_stay_exact_with_lossy():
    block = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    model = Of(lambda self, x: F.mse_loss(checkpoint(self.block, x, use_reentrant=False), x * 2), block=block)
    x = torch.randn(4, 6)
    assert_bitwise(gradients(model, x, lossy="fp8")[0], gradients(model, x, on=False)[0])


def test_a_graph_that_is_collected_while_its_tensors_are_encoded_leaves_nothing(monkeypatch):
    """Python collects garbage whenever it likes; a graph is garbage where something in it refers to it."""
    model, counted, kept = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.MaxPool2d(2)), [], []

    class Counts:
        def announced(self, tensor, fate, earlier=None):
            counted.append(number := len(counted))
            return lambda: counted.remove(number) if number in counted else None

    def collects(*args):
        kept.clear()
        return plain(*args)

    plain = compressed_storages.encode
    monkeypatch.setattr(compressed_storages, "encode", collects)
    monkeypatch.setattr(fates, "observers", [Counts()])
    with compressed(model) as compression:
        kept.append(model(torch.randn(2, 3, 8, 8)))
        assert counted
        kept[:] = [kept[0].grad_fn]
    assert not counted
    assert not compression._table
    assert {code for layer in compression.layers.values() for code in layer.after} <= {"bits", "raw"}


def test_a_plan_may_say_no():
    model = nn.Sequential(convolution(), nn.ReLU(), nn.MaxPool2d(2), convolution(4))
    with compressed(model) as compression:
        compression.chooses = lambda tensor: tensor.dtype is torch.int64
        model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert compression.layers["1"].after == {"raw": 2 * 4 * 64 * 4}
    assert compression.layers["2"].after == {"argmax": 2 * 4 * 16 // 2}
