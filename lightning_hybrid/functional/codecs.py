"""Saved activations in fewer bytes: what encodes them, what decodes them, and how far apart the two may be.

Source: Jain et al. 2018, Gist (ISCA), section IV. All work on any shape, strides and device, and in pieces of at most
`CHUNK` elements, so that encoding a large tensor never needs another of its size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

CHUNK = 2**22
"""Elements that are worked on at once, a multiple of all that are packed together."""
COLUMNS = 256
"""Elements of a row of a sparse tensor: as many as a byte can count."""
FP10_PER_WORD, FP10_BITS = 3, 10
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
_SHIFTS = (1, 2, 4, 8, 16, 32, 64, 128)


def pieces(flat: Tensor) -> Iterator[Tensor]:
    """A flat tensor in parts of `CHUNK` elements."""
    return iter(flat.split(CHUNK) if flat.numel() else ())


def pack_bits(mask: Tensor) -> Tensor:
    """Eight to a byte.

    Args:
        mask: bool ``[...]``.

    Returns:
        uint8 ``[ceil(n / 8)]``, the first element in the lowest bit.
    """
    flat = mask.reshape(-1)
    bits = torch.zeros(ceil(flat.numel() / 8), dtype=torch.uint8, device=mask.device)
    shifts = torch.tensor(_SHIFTS, dtype=torch.uint8, device=mask.device)
    for part, out in zip(pieces(flat), bits.split(CHUNK // 8), strict=False):
        whole = torch.nn.functional.pad(part.to(torch.uint8), (0, -part.numel() % 8))
        torch.sum(whole.view(-1, 8) * shifts, 1, dtype=torch.uint8, out=out)
    return bits


def unpack_bits(bits: Tensor, shape: torch.Size) -> Tensor:
    """What `pack_bits` packed, bool of that shape."""
    shifts = torch.tensor(_SHIFTS, dtype=torch.uint8, device=bits.device)
    flat = torch.empty(shape.numel(), dtype=torch.bool, device=bits.device)
    for out, part in zip(pieces(flat), bits.split(CHUNK // 8), strict=False):
        out.copy_((part[:, None] & shifts).ne(0).view(-1)[: out.numel()])
    return flat.view(shape)


def encode_positive(output: Tensor) -> Tensor:
    """One bit an element of what a ReLU gave: whether its gradient passes, which NaN lets pass too."""
    return pack_bits(output.le(0).logical_not_())


def decode_positive(bits: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor that the gradient of a ReLU takes for its result: one where it passes, else zero."""
    return unpack_bits(bits, shape).to(dtype)


@dataclass(frozen=True)
class Sparse:
    """Compressed sparse rows of `COLUMNS` elements each.

    Attributes:
        values: Elements whose bits are not all zero, ``[nnz]``.
        columns: Their places in their rows, uint8 ``[nnz]``.
        counts: How many each row has, int16 ``[rows]``.
        shape: Of the dense tensor.
    """

    values: Tensor
    columns: Tensor
    counts: Tensor
    shape: torch.Size

    @property
    def num_bytes(self) -> int:
        """Bytes of all three tensors."""
        return self.values.nbytes + self.columns.nbytes + self.counts.nbytes


def sparse_bytes(number: int, num_nonzero: int, itemsize: int) -> int:
    """Bytes of a sparse tensor: of each element that is there its value and a byte, and two bytes a row."""
    return (itemsize + 1) * num_nonzero + 2 * ceil(number / COLUMNS)


def encode_sparse(dense: Tensor) -> Sparse | None:
    """Keep what is not zero; exactly, with NaN, infinities and negative zeros.

    Args:
        dense: Of a floating type of 2, 4 or 8 bytes.

    Returns:
        None where that would not be smaller.
    """
    flat = dense.reshape(-1)
    integers = flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dense.element_size()])
    rows = torch.zeros(ceil(flat.numel() / COLUMNS), dtype=torch.int16, device=dense.device)
    for part, out in zip(pieces(integers), rows.split(CHUNK // COLUMNS), strict=False):
        present = torch.nn.functional.pad(part.ne(0), (0, -part.numel() % COLUMNS))
        torch.sum(present.view(-1, COLUMNS), 1, dtype=torch.int16, out=out)
    number = int(rows.sum(dtype=torch.int64))
    if sparse_bytes(flat.numel(), number, dense.element_size()) >= dense.numel() * dense.element_size():
        return None
    values = flat.new_empty(number)
    columns = torch.empty(number, dtype=torch.uint8, device=dense.device)
    start = 0
    for part, bits in zip(pieces(flat), pieces(integers), strict=True):
        places = bits.ne(0).nonzero().squeeze(1)
        stop = start + places.numel()
        values[start:stop] = part[places]
        columns[start:stop] = places.remainder_(COLUMNS).to(torch.uint8)
        start = stop
    return Sparse(values, columns, rows, dense.shape)


def decode_sparse(sparse: Sparse) -> Tensor:
    """The dense tensor, contiguous."""
    flat = sparse.values.new_zeros(sparse.shape.numel())
    start, rows_of_part = 0, CHUNK // COLUMNS
    for part, counts in zip(pieces(flat), sparse.counts.split(rows_of_part), strict=False):
        stop = start + int(counts.sum(dtype=torch.int64))
        rows = torch.arange(counts.numel(), device=flat.device).repeat_interleave(counts.long())
        part[rows * COLUMNS + sparse.columns[start:stop].long()] = sparse.values[start:stop]
        start = stop
    return flat.view(sparse.shape)


def encode_fp10(tensor: Tensor) -> Tensor:
    """Sign, 5 bits of exponent and 4 of mantissa (the top of float16), three to an int32, rounded to nearest, even.

    Returns:
        int32 ``[ceil(n / 3)]``; too large becomes infinite, NaN stays NaN.
    """
    flat = tensor.reshape(-1)
    words = torch.zeros(ceil(flat.numel() / FP10_PER_WORD), dtype=torch.int32, device=tensor.device)
    step = CHUNK // FP10_PER_WORD * FP10_PER_WORD
    for part, out in zip(flat.split(step), words.split(step // FP10_PER_WORD), strict=False):
        codes = torch.nn.functional.pad(_fp10_codes(part), (0, -part.numel() % FP10_PER_WORD)).view(-1, FP10_PER_WORD)
        out.copy_(codes[:, 0] | codes[:, 1] << FP10_BITS | codes[:, 2] << 2 * FP10_BITS)
    return words


def decode_fp10(words: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """What `encode_fp10` kept, in a floating type."""
    flat = torch.empty(shape.numel(), dtype=dtype, device=words.device)
    step = CHUNK // FP10_PER_WORD * FP10_PER_WORD
    for out, part in zip(flat.split(step), words.split(step // FP10_PER_WORD), strict=False):
        codes = torch.stack([part >> FP10_BITS * index & 0x3FF for index in range(FP10_PER_WORD)], 1).view(-1)
        out.copy_((codes << 6).to(torch.int16).view(torch.float16)[: out.numel()])
    return flat.view(shape)


def _fp10_codes(part: Tensor) -> Tensor:
    """The ten bits of each element, int32; halves between two codes that float16 has rounded to are decided by it."""
    half = part.to(torch.float16)
    bits = half.view(torch.int16).to(torch.int32) & 0xFFFF
    rounded = (bits + 0x1F + (bits >> 6 & 1)) >> 6
    return torch.where(half.isnan(), bits >> 6 | 1, rounded) & 0x3FF


def encode_fp8(tensor: Tensor) -> Tensor:
    """Sign, 4 bits of exponent and 3 of mantissa: torch's float8_e4m3fn, which has no infinity.

    Returns:
        Of the tensor's shape. What is finite and too large becomes the largest, 448; what is infinite becomes NaN.
    """
    encoded = torch.empty(tensor.numel(), dtype=FP8, device=tensor.device)
    for part, out in zip(pieces(tensor.reshape(-1)), pieces(encoded), strict=True):
        wide = part.to(torch.promote_types(part.dtype, torch.float32))
        limited = wide.clamp(-FP8_MAX, FP8_MAX).to(FP8)
        out.copy_(torch.where(wide.isinf(), torch.full((), torch.nan, device=out.device), limited.float()).to(FP8))
    return encoded.view(tensor.shape)


def decode_fp8(encoded: Tensor, dtype: torch.dtype) -> Tensor:
    """What `encode_fp8` kept, in a floating type."""
    return encoded.to(dtype)


@dataclass(frozen=True)
class Window:
    """Geometry of a two-dimensional max-pool: each pair is of height and width.

    Attributes:
        kernel: Size of the window.
        stride: Distance of windows.
        padding: On each side.
        dilation: Distance of a window's elements.
        width: Of the input.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    width: int

    @property
    def per_byte(self) -> int:
        """Places that fit into a byte: 2 of windows of up to 16 elements, 1 of up to 256, else 0."""
        area = self.kernel[0] * self.kernel[1]
        return 2 if area <= 16 else int(area <= 256)


def encode_argmax(indices: Tensor, window: Window) -> Tensor:
    """Places of the largest elements within their windows.

    Args:
        indices: As `max_pool2d` gives them, int64 ``[..., height, width]`` of the output.
        window: Its geometry, of at most 256 elements.

    Returns:
        uint8, two to a byte for windows of up to 16 elements.
    """
    codes = torch.empty(indices.numel(), dtype=torch.uint8, device=indices.device)
    starts = _starts(indices.shape, window, indices.device)
    for part, out, (top, left) in zip(pieces(indices.reshape(-1)), pieces(codes), starts, strict=True):
        row = (part.div(window.width, rounding_mode="floor") - top).div(window.dilation[0], rounding_mode="floor")
        column = (part.remainder(window.width) - left).div(window.dilation[1], rounding_mode="floor")
        out.copy_(row * window.kernel[1] + column)
    if window.per_byte == 1:
        return codes
    first, second = torch.nn.functional.pad(codes, (0, codes.numel() % 2)).view(-1, 2).unbind(1)
    return first | second << 4


def decode_argmax(encoded: Tensor, shape: torch.Size, window: Window) -> Tensor:
    """The indices again, int64 of that shape."""
    codes = encoded if window.per_byte == 1 else torch.stack([encoded & 15, encoded >> 4], 1).view(-1)
    indices = torch.empty(shape.numel(), dtype=torch.int64, device=encoded.device)
    starts = _starts(shape, window, encoded.device)
    for part, out, (top, left) in zip(pieces(codes[: shape.numel()]), pieces(indices), starts, strict=True):
        row = part.long().div(window.kernel[1], rounding_mode="floor") * window.dilation[0] + top
        column = part.long().remainder(window.kernel[1]) * window.dilation[1] + left
        out.copy_(row * window.width + column)
    return indices.view(shape)


def _starts(shape: torch.Size, window: Window, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Row and column of each window's first element, which may lie in the padding, piece by piece."""
    for start in range(0, shape.numel(), CHUNK):
        place = torch.arange(start, min(start + CHUNK, shape.numel()), device=device)
        row = place.div(shape[-1], rounding_mode="floor").remainder_(shape[-2])
        column = place.remainder_(shape[-1])
        yield row * window.stride[0] - window.padding[0], column * window.stride[1] - window.padding[1]


@dataclass(frozen=True)
class ErrorBound:
    """How far a decoded number is from the encoded one: at most the larger of both.

    Attributes:
        relative: In units of the number.
        absolute: Near zero.
        largest: Largest finite number that there is.
    """

    relative: float
    absolute: float
    largest: float

    def of(self, tensor: Tensor) -> Tensor:
        """Of each number, float64."""
        return (tensor.double().abs() * self.relative).clamp(min=self.absolute)


ERROR_BOUNDS = {
    "fp16": ErrorBound(2**-11, 2**-25, 65504.0),
    "fp10": ErrorBound(2**-5 + 2**-11, 2**-19 + 2**-25, 63488.0),  # float16 rounds first
    "fp8": ErrorBound(2**-4, 2**-10, FP8_MAX),
}
