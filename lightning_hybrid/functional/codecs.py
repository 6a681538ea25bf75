"""Saved activations in fewer bytes: what encodes them, what decodes them, and how far apart the two may be.

Source: Jain et al. 2018, Gist (ISCA), section IV. All work on any shape, strides and device, and in pieces of at most
`CHUNK` elements, so that encoding a large tensor never needs another of its size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import ceil

import numpy as np
import torch
from torch import Tensor

CHUNK = 2**22
"""Elements that are worked on at once, a multiple of all that are packed together."""
COLUMNS = 256
"""Elements of a row of a sparse tensor: as many as a byte can count."""
FP10_PER_WORD, FP10_BITS = 3, 10
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
_GATHER = 0x0102040810204080
"""Times eight bytes of 0 or 1 in a word: their sum of powers of two is in its highest byte."""


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
    for part, out in zip(pieces(flat), bits.split(CHUNK // 8), strict=False):
        _pack(part, out)
    return bits


def _pack(mask: Tensor, out: Tensor) -> None:
    whole = torch.nn.functional.pad(mask, (0, -mask.numel() % 8)) if mask.numel() % 8 else mask.contiguous()
    out.copy_((whole.clone() if whole.storage_offset() % 8 else whole).view(torch.int64) * _GATHER >> 56)


def unpack_bits(bits: Tensor, shape: torch.Size, dtype: torch.dtype = torch.bool) -> Tensor:
    """What `pack_bits` packed, of that shape: true and false, or one and zero in another type."""
    flat = torch.empty(shape.numel(), dtype=dtype, device=bits.device)
    words = _bytes_of_bits(bits.device)
    for out, part in zip(pieces(flat), bits.split(CHUNK // 8), strict=False):
        out.copy_(words.index_select(0, part.int()).view(torch.bool)[: out.numel()])
    return flat.view(shape)


@cache
def _bytes_of_bits(device: torch.device) -> Tensor:
    """Of each byte, its bits as eight bytes of 0 or 1 in a word, int64 ``[256]``."""
    shifts = torch.arange(8, device=device)
    spread = (torch.arange(256, device=device)[:, None] >> shifts & 1).to(torch.uint8)
    return spread.view(torch.int64).view(-1)


def encode_positive(output: Tensor) -> Tensor:
    """One bit an element of what a ReLU gave: whether its gradient passes, which NaN lets pass too."""
    flat = output.reshape(-1)
    bits = torch.zeros(ceil(flat.numel() / 8), dtype=torch.uint8, device=output.device)
    for part, out in zip(pieces(flat), bits.split(CHUNK // 8), strict=False):
        _pack(part.le(0).logical_not_(), out)
    return bits


def decode_positive(bits: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor that the gradient of a ReLU takes for its result: one where it passes, else zero."""
    return unpack_bits(bits, shape, dtype)


@dataclass(frozen=True)
class Sparse:
    """What is not zero of a tensor, and where it is.

    Attributes:
        values: Elements whose bits are not all zero, ``[nnz]``.
        places: With `counts`, their places in rows of `COLUMNS`, uint8 ``[nnz]``; else a bit for each element,
            uint8 ``[ceil(n / 8)]``.
        counts: How many each row has, int16 ``[rows]``; or None.
        shape: Of the dense tensor.
    """

    values: Tensor
    places: Tensor
    counts: Tensor | None
    shape: torch.Size

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is kept."""
        return (self.values, self.places) if self.counts is None else (self.values, self.places, self.counts)


def sparse_bytes(number: int, num_nonzero: int, itemsize: int) -> int:
    """Bytes of a sparse tensor: its values, and with few of them a byte each and two a row, else a bit an element."""
    return itemsize * num_nonzero + min(num_nonzero + 2 * ceil(number / COLUMNS), ceil(number / 8))


def encode_sparse(dense: Tensor) -> Sparse | None:
    """Keep what is not zero; exactly, with NaN, infinities and negative zeros.

    Args:
        dense: Of a floating type of 2, 4 or 8 bytes.

    Returns:
        Compressed rows, or a bitmap where more than an eighth or so is not zero. None where it would not be smaller.
    """
    flat, number = dense.reshape(-1), dense.numel()
    integers = flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dense.element_size()])
    total = sum(int(part.count_nonzero()) for part in pieces(integers))
    if sparse_bytes(number, total, dense.element_size()) >= number * dense.element_size():
        return None
    has_rows = total + 2 * ceil(number / COLUMNS) < ceil(number / 8)
    values = flat.new_empty(total)
    places = torch.empty(total if has_rows else ceil(number / 8), dtype=torch.uint8, device=dense.device)
    counts = torch.zeros(ceil(number / COLUMNS), dtype=torch.int16, device=dense.device) if has_rows else None
    start = 0
    for index, (part, bits) in enumerate(zip(pieces(flat), pieces(integers), strict=True)):
        mask = bits.ne(0)
        found = _true_places(mask)
        stop = start + found.numel()
        torch.index_select(part, 0, found, out=values[start:stop])
        if counts is None:
            _pack(mask, places[index * CHUNK // 8 :][: ceil(part.numel() / 8)])
        else:
            per_row = torch.bincount(found.div(COLUMNS, rounding_mode="floor"))
            counts[index * CHUNK // COLUMNS :][: per_row.numel()] = per_row.to(torch.int16)
            places[start:stop] = found.remainder_(COLUMNS)
        start = stop
    return Sparse(values, places, counts, dense.shape)


def decode_sparse(sparse: Sparse) -> Tensor:
    """The dense tensor, contiguous."""
    flat = sparse.values.new_zeros(sparse.shape.numel())
    start = 0
    for index, part in enumerate(pieces(flat)):
        if sparse.counts is None:
            bits = sparse.places[index * CHUNK // 8 :][: ceil(part.numel() / 8)]
            found = _true_places(unpack_bits(bits, torch.Size([part.numel()])))
            stop = start + found.numel()
        else:
            counts = sparse.counts[index * CHUNK // COLUMNS :][: ceil(part.numel() / COLUMNS)].long()
            stop = start + int(counts.sum())
            rows = torch.arange(counts.numel(), device=flat.device).repeat_interleave(counts)
            found = rows.mul_(COLUMNS).add_(sparse.places[start:stop])
        part.index_copy_(0, found, sparse.values[start:stop])
        start = stop
    return flat.view(sparse.shape)


def _true_places(mask: Tensor) -> Tensor:
    """Where a flat mask is true, int64; NumPy finds it in a sixth of torch's time on processors."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().squeeze(1)


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
        low, high = torch.aminmax(part)
        if not (low >= -FP8_MAX and high <= FP8_MAX):  # nor are NaNs
            nan = torch.full((), torch.nan, dtype=part.dtype, device=part.device)
            part = torch.where(part.isinf(), nan, part.clamp(-FP8_MAX, FP8_MAX))
        out.copy_(part.to(torch.promote_types(part.dtype, torch.float32)))
    return encoded.view(tensor.shape)


def decode_fp8(encoded: Tensor, dtype: torch.dtype) -> Tensor:
    """What `encode_fp8` kept, in a floating type."""
    flat = torch.empty(encoded.numel(), dtype=dtype, device=encoded.device)
    numbers = torch.arange(256, device=encoded.device).to(torch.uint8).view(FP8).to(dtype)
    for out, part in zip(pieces(flat), pieces(encoded.reshape(-1)), strict=True):
        torch.index_select(numbers, 0, part.view(torch.uint8).int(), out=out)
    return flat.view(encoded.shape)


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
