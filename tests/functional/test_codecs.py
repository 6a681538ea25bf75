import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from lightning_hybrid.compat import TorchDispatchMode
from lightning_hybrid.functional import codecs, pool_codecs
from lightning_hybrid.functional.codecs import ERROR_BOUNDS, Sparse
from lightning_hybrid.functional.pool_codecs import Window

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-8, 2.0**-25, 2.0**-14, 65504.0, -70000.0, 448.0, 240.5)
NUMBERS = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32), st.floats(-500, 500, width=32))
SHAPES = st.sampled_from([(), (0,), (1,), (7,), (3, 0, 2), (5, 3), (2, 3, 4), (1025,), (2, 700), (513, 3)])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several pieces of each larger tensor."""
    monkeypatch.setattr(codecs, "CHUNK", 512)
    monkeypatch.setattr(pool_codecs, "CHUNK", 512)


@st.composite
def tensors(draw, dtypes=FLOATS):
    """Some numbers of interest, zeros and negative zeros, noise; contiguous, transposed or every second element."""
    shape, dtype, seed = draw(SHAPES), draw(st.sampled_from(dtypes)), draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    layout = draw(st.sampled_from(["contiguous", "transposed", "strided"]))
    made = (*shape[:-1], 2 * shape[-1]) if layout == "strided" and shape else shape
    noise = torch.randn(made, generator=generator, dtype=torch.float64).mul(10.0 ** draw(st.integers(-6, 4)))
    noise[torch.rand(made, generator=generator) < draw(st.sampled_from([0.0, 0.5, 0.95, 1.0]))] = 0.0
    flat = noise.reshape(-1)
    for index, number in enumerate(draw(st.lists(NUMBERS, max_size=5))):
        flat[index : index + 1] = number
    tensor = noise.to(dtype)
    if layout == "transposed" and tensor.ndim > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    return tensor[..., ::2] if layout == "strided" and shape else tensor


def bits_of(tensor):
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().reshape(-1).view(kinds[tensor.element_size()]).tolist()


@given(tensor=tensors())
def test_masks_come_back_from_an_eighth_of_a_byte_each(tensor):
    mask = tensor > 0
    bits = codecs.pack_bits(mask)
    assert bits.dtype == torch.uint8
    assert bits.numel() == math.ceil(mask.numel() / 8)
    assert torch.equal(codecs.unpack_bits(bits, mask.shape), mask)


@given(tensor=tensors())
def test_the_gradient_of_a_relu_is_that_of_its_own_result(tensor):
    inputs = tensor.detach().clone().requires_grad_()
    result = F.relu(inputs)
    gradient = torch.full_like(result, 3.0)
    (expected,) = torch.autograd.grad(result, inputs, gradient)
    decoded = codecs.decode_positive(codecs.encode_positive(result.detach()), result.shape, result.dtype)
    found = torch.ops.aten.threshold_backward(gradient, decoded, 0)
    assert bits_of(found) == bits_of(expected)


@given(tensor=tensors())
def test_sparse_tensors_come_back_bit_for_bit_from_fewer_bytes(tensor):
    sparse = codecs.encode_sparse(tensor)
    nonzero = sum(bits != 0 for bits in bits_of(tensor))
    size = codecs.sparse_bytes(tensor.numel(), nonzero, tensor.element_size())
    if size >= tensor.numel() * tensor.element_size():
        assert sparse is None
        return
    assert isinstance(sparse, Sparse)
    assert sum(kept.nbytes for kept in sparse.tensors) == size < tensor.numel() * tensor.element_size()
    decoded = codecs.decode_sparse(sparse)
    assert (decoded.shape, decoded.dtype) == (tensor.shape, tensor.dtype)
    assert bits_of(decoded) == bits_of(tensor)
    few = nonzero + 2 * math.ceil(tensor.numel() / 256) < math.ceil(tensor.numel() / 8)
    assert (sparse.counts is not None) == few


@given(
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    stride=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    share=st.floats(0, 0.5),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    ceil_mode=st.booleans(),
    seed=st.integers(0, 99),
)
def test_places_in_windows_give_the_indices_of_a_pool(kernel, stride, share, dilation, ceil_mode, seed):
    padding = tuple(int(size * share) for size in kernel)
    images = torch.randn(2, 3, 11, 13, generator=torch.Generator().manual_seed(seed)).relu_()  # with ties
    _, indices = F.max_pool2d(images, kernel, stride, padding, dilation, ceil_mode, return_indices=True)
    window = Window(kernel, stride, padding, dilation, images.shape[-1])
    encoded = pool_codecs.encode_argmax(indices, window)
    assert encoded.nbytes == math.ceil(indices.numel() / window.per_byte)
    assert torch.equal(pool_codecs.decode_argmax(encoded, indices.shape, window), indices)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("dilation", [(1, 1), (1, 2), (2, 1), (2, 3)])
def test_windows_wider_than_an_image_are_encoded_only_if_their_places_come_back(width, dilation):
    checked = 0
    for kernel in itertools.product((1, 2, 4), repeat=2):
        padding = tuple(size // 2 for size in kernel)
        if any(d * (k - 1) >= n + 2 * p for d, k, n, p in zip(dilation, kernel, (7, width), padding, strict=True)):
            continue  # no place for a window
        images = torch.randn(2, 7, width, generator=torch.Generator().manual_seed(1))
        _, indices = F.max_pool2d(images, kernel, 1, padding, dilation, return_indices=True)
        window = Window(kernel, (1, 1), padding, dilation, width)
        if window.per_byte:
            encoded = pool_codecs.encode_argmax(indices, window)
            assert torch.equal(pool_codecs.decode_argmax(encoded, indices.shape, window), indices)
            checked += 1
    assert checked
    assert Window((2, 2), (1, 1), (0, 1), (1, 2), 2).per_byte == 0  # steps by two columns are steps by a row
    assert Window((2, 2), (1, 1), (0, 1), (1, 2), 3).per_byte == 2


class Allocated(TorchDispatchMode):
    """Bytes of each storage that operations make."""

    def __init__(self):
        super().__init__()
        self.bytes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.bytes[StorageWeakRef(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        return result

    def of(self, whole):
        """How many are new that have an eighth of a tensor's bytes and more."""
        given = StorageWeakRef(whole.untyped_storage())
        return sum(size > whole.nbytes / 8 for storage, size in self.bytes.items() if storage != given)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_large_tensors_are_encoded_in_pieces_and_decoded_into_one_of_their_size(monkeypatch, memory_format):
    monkeypatch.setattr(codecs, "CHUNK", 2**8)
    monkeypatch.setattr(pool_codecs, "CHUNK", 2**8)
    images = torch.randn(8, 32, 8, 8).relu_().bfloat16().contiguous(memory_format=memory_format)
    _, indices = F.max_pool2d(images, 3, 1, 1, return_indices=True)
    flat = images.as_strided((images.numel(),), (1,))
    window = Window((3, 3), (1, 1), (1, 1), (1, 1), 8)
    for whole, encode, decode in (
        (flat, codecs.encode_positive, lambda bits: codecs.decode_positive(bits, flat.shape, flat.dtype)),
        (
            indices,
            lambda whole: pool_codecs.encode_argmax(whole, window),
            lambda codes: pool_codecs.decode_argmax(codes, indices.shape, window, torch.empty_like(indices)),
        ),
    ):
        decode(encode(whole))  # makes tables that stay, if no test before has
        with Allocated() as encoding:
            encoded = encode(whole)
        with Allocated() as decoding:
            decoded = decode(encoded)
        assert (encoding.of(whole), decoding.of(whole)) == (0, 1)
        assert torch.equal(decoded, whole if whole is indices else (whole > 0).to(whole.dtype))
        assert decoded.stride() == whole.stride()


LOSSY = {
    "fp16": (lambda t: t.to(torch.float16), lambda e, t: e.to(t.dtype), 16),
    "fp10": (codecs.encode_fp10, lambda e, t: codecs.decode_fp10(e, t.shape, t.dtype), 32 / 3),
    "fp8": (codecs.encode_fp8, lambda e, t: codecs.decode_fp8(e, t.dtype), 8),
}


@pytest.mark.parametrize("name", LOSSY)
@given(tensor=tensors((torch.float64, torch.float32)))
def test_what_is_lost_keeps_to_its_bound(name, tensor):
    encode, decode, bits = LOSSY[name]
    encoded = encode(tensor)
    assert encoded.nbytes <= math.ceil(tensor.numel() * bits / 32) * 4
    decoded, bound = decode(encoded, tensor), ERROR_BOUNDS[name]
    assert (decoded.shape, decoded.dtype) == (tensor.shape, tensor.dtype)
    fits = tensor.abs() <= bound.largest
    assert decoded[tensor.isnan()].isnan().all()
    error = (decoded.double() - tensor.double()).abs()
    assert bool((error <= bound.of(tensor))[fits].all())
    assert bool((decoded.signbit() == tensor.signbit())[fits].all())
    beyond = ~fits & ~tensor.isnan()
    if name == "fp8":
        assert decoded[beyond & tensor.isinf()].isnan().all()
        assert (decoded[beyond & ~tensor.isinf()].abs() == bound.largest).all()
    else:  # at least the largest, and with the sign
        assert ((decoded.abs() >= bound.largest) & (decoded.signbit() == tensor.signbit()))[beyond].all()


def test_every_ten_bit_number_is_a_fixed_point():
    codes = torch.arange(1024, dtype=torch.int32)
    numbers = (codes << 6).to(torch.int16).view(torch.float16).float()
    again = codecs.decode_fp10(codecs.encode_fp10(numbers), numbers.shape, numbers.dtype)
    assert torch.equal(again.nan_to_num(nan=7.25), numbers.nan_to_num(nan=7.25))
    assert codecs.encode_fp10(numbers).numel() == 342


@pytest.mark.parametrize(("number", "expected"), [(1.03125, 1.0), (1.09375, 1.125), (1.0312501, 1.0), (-3.3, -3.25)])
def test_ten_bits_round_to_nearest_even(number, expected):
    tensor = torch.tensor([number])
    assert codecs.decode_fp10(codecs.encode_fp10(tensor), tensor.shape, tensor.dtype).item() == expected
