"""A storage that autograd has saved, encoded for all operations that saved it (Gist, Jain et al. 2018, section IV)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_hybrid.functional import codecs
from lightning_hybrid.functional.codecs import ERROR_BOUNDS, Sparse, Window
from lightning_hybrid.parallel.memory.offload_copies import Geometry
from lightning_hybrid.parallel.memory.savers import Kind, Saver

Lossy = Literal["fp16", "fp10", "fp8"]
LOSSY: tuple[Lossy, ...] = get_args(Lossy)
BYTES = {"fp16": 2, "fp10": 4 / 3, "fp8": 1}
"""Of a number in a lossy format."""
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
READ_AS_NUMBERS: tuple[Kind, ...] = ("exact", "other")
"""Kinds of savers that read numbers, and not signs, shapes or places."""
MOST_SAMPLES = 4096

Decoder = Callable[[], Tensor]
"""Makes a storage again, flat, in its type, and holds nothing of the first one."""


@dataclass(frozen=True)
class Codec:
    """What may be done to a saved tensor.

    Attributes:
        lossless: Bits, places and sparse rows.
        lossy: A format for the numbers that these leave, or None.
    """

    lossless: bool = True
    lossy: Lossy | None = None


@dataclass(frozen=True)
class Encoded:
    """What is kept of a storage.

    Attributes:
        code: In a few words, how it is kept.
        tensors: What is kept.
        decoders: By kind of saver; a "pool" has none, as it reads nothing. Kinds that read the same share one.
    """

    code: str
    tensors: tuple[Tensor, ...]
    decoders: dict[Kind, Decoder]

    @property
    def num_bytes(self) -> int:
        """Bytes of what is kept."""
        return sum(tensor.nbytes for tensor in self.tensors)


def may_be_sparse(tensor: Tensor) -> bool:
    """Whether a sample of a floating tensor's memory has so many zeros that compressed rows are smaller."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    flat = tensor.detach().as_strided((reach,), (1,))
    sample = flat[:: max(1, reach // MOST_SAMPLES) | 1]
    return int(sample.count_nonzero()) * (tensor.element_size() + 1) < sample.numel() * tensor.element_size()


def encode(storage: torch.UntypedStorage, savers: Collection[tuple[Saver, Geometry]], codec: Codec) -> Encoded | None:
    """Encode a whole storage, in pieces.

    Args:
        storage: As it was when it was saved.
        savers: All who saved it, and how their tensors lie in it.
        codec: What may be done.

    Returns:
        None where nothing would be smaller, or where a number is beyond the largest that the lossy format has.
    """
    kinds, geometries = {saver.kind for saver, _ in savers}, {geometry for _, geometry in savers}
    dtype, *others = {geometry.dtype for geometry in geometries}
    if others or any(geometry.is_conjugate or geometry.is_negative for geometry in geometries):
        return None
    count = torch.Size([storage.nbytes() // dtype.itemsize])
    flat = Geometry(dtype, count, (1,), 0, False, False).view(storage)
    encoded: Encoded | None = None
    if dtype is torch.bool and codec.lossless:
        bits = codecs.pack_bits(flat)
        encoded = Encoded("bits", (bits,), dict.fromkeys(kinds, partial(codecs.unpack_bits, bits, flat.shape)))
    elif kinds == {"argmax"} and codec.lossless:
        encoded = _places(flat, savers)
    elif dtype in FLOATS:
        encoded = _numbers(flat, kinds, codec)
    return encoded if encoded is not None and encoded.num_bytes < storage.nbytes() else None


def _places(flat: Tensor, savers: Collection[tuple[Saver, Geometry]]) -> Encoded | None:
    """Of each maximum its place in its window."""
    (window, geometry), *others = {(saver.window, geometry) for saver, geometry in savers}
    if others or window is None or not window.per_byte or geometry.size.numel() != flat.numel():
        return None
    encoded = codecs.encode_argmax(geometry.view(flat.untyped_storage()), window)
    return Encoded("argmax", (encoded,), {"argmax": partial(_from_places, encoded, geometry, window)})


def _from_places(encoded: Tensor, geometry: Geometry, window: Window) -> Tensor:
    indices = codecs.decode_argmax(encoded, geometry.size, window)
    flat = torch.empty(indices.numel(), dtype=indices.dtype, device=indices.device)
    flat.as_strided(geometry.size, geometry.stride).copy_(indices)
    return flat


def _numbers(flat: Tensor, kinds: set[Kind], codec: Codec) -> Encoded | None:
    """Of a floating storage what its savers read: nothing, signs, or numbers."""
    reads_numbers = not kinds.isdisjoint(READ_AS_NUMBERS)
    if not reads_numbers and codec.lossless:
        return _signs(flat) if "relu" in kinds else Encoded("shape", (), {})
    found: list[Encoded] = []
    sparse = codecs.encode_sparse(flat) if codec.lossless and may_be_sparse(flat) else None
    if sparse is not None:
        found.append(
            Encoded("sparse", _tensors_of(sparse), dict.fromkeys(kinds, partial(codecs.decode_sparse, sparse)))
        )
    if codec.lossy is not None and "exact" not in kinds and _is_within(flat, ERROR_BOUNDS[codec.lossy].largest):
        reduced = _reduced(flat, sparse, codec.lossy)
        found.append(_with_signs(reduced, _signs(flat)) if "relu" in kinds else reduced)
    return min(found, key=lambda one: one.num_bytes, default=None)


def _signs(flat: Tensor) -> Encoded:
    bits = codecs.encode_positive(flat)
    return Encoded("bits", (bits,), {"relu": partial(codecs.decode_positive, bits, flat.shape, flat.dtype)})


def _with_signs(reduced: Encoded, signs: Encoded) -> Encoded:
    """A ReLU reads signs, which small numbers lose when they become zero."""
    tensors, decoders = reduced.tensors + signs.tensors, reduced.decoders | signs.decoders
    return Encoded(f"bits {reduced.code}", tensors, decoders)


def _reduced(flat: Tensor, sparse: Sparse | None, lossy: Lossy) -> Encoded:
    """Numbers in a lossy format, all of them or those that are not zero, whichever is smaller."""
    if sparse is not None and sparse.values.numel() * (BYTES[lossy] + 1) > flat.numel() * BYTES[lossy]:
        sparse = None
    values = flat if sparse is None else sparse.values
    words = {"fp16": _to_half, "fp10": codecs.encode_fp10, "fp8": codecs.encode_fp8}[lossy](values)
    whole = partial(_from_words, words, values.shape, flat.dtype)
    if sparse is None:
        return Encoded(lossy, (words,), dict.fromkeys(READ_AS_NUMBERS, whole))
    rows = replace(sparse, values=words)
    dense = partial(_from_rows, rows, whole)
    return Encoded(f"sparse {lossy}", _tensors_of(rows), dict.fromkeys(READ_AS_NUMBERS, dense))


def _from_rows(rows: Sparse, values: Decoder) -> Tensor:
    return codecs.decode_sparse(replace(rows, values=values()))


def _to_half(values: Tensor) -> Tensor:
    return values.to(torch.float16)


def _from_words(words: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return codecs.decode_fp10(words, shape, dtype) if words.dtype is torch.int32 else words.to(dtype)


def _is_within(flat: Tensor, largest: float) -> bool:
    """Whether all numbers are finite and no larger."""
    if not flat.numel():
        return False
    low, high = torch.aminmax(flat)
    return bool((low >= -largest) & (high <= largest))


def _tensors_of(sparse: Sparse) -> tuple[Tensor, ...]:
    return sparse.values, sparse.columns, sparse.counts
