"""A storage that autograd has saved, encoded for all operations that saved it (Gist, Jain et al. 2018, section IV)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_hybrid.functional import codecs, pool_codecs
from lightning_hybrid.functional.codecs import ERROR_BOUNDS, Sparse
from lightning_hybrid.functional.pool_codecs import Window
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
        return _size(self.tensors)


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
    encoded = pool_codecs.encode_argmax(geometry.view(flat.untyped_storage()), window)
    return Encoded("argmax", (encoded,), {"argmax": partial(_from_windows, encoded, geometry, window)})


def _from_windows(encoded: Tensor, geometry: Geometry, window: Window) -> Tensor:
    flat = torch.empty(geometry.size.numel(), dtype=geometry.dtype, device=encoded.device)
    pool_codecs.decode_argmax(encoded, geometry.size, window, flat.as_strided(geometry.size, geometry.stride))
    return flat


def _numbers(flat: Tensor, kinds: set[Kind], codec: Codec) -> Encoded | None:
    """Of a floating storage what its savers read: nothing, signs, or numbers."""
    if kinds.isdisjoint(READ_AS_NUMBERS):
        return _signs(flat) if "relu" in kinds else Encoded("shape", (), {})
    found: list[Encoded] = []
    sparse = codecs.encode_sparse(flat) if codec.lossless and may_be_sparse(flat) else None
    if sparse is not None:
        found.append(Encoded("sparse", sparse.tensors, dict.fromkeys(kinds, partial(codecs.decode_sparse, sparse))))
    if codec.lossy is not None and "exact" not in kinds and _is_within(flat, ERROR_BOUNDS[codec.lossy].largest):
        found.append(_reduced(flat, sparse, _signs(flat) if "relu" in kinds else None, codec.lossy))
    return min(found, key=lambda one: one.num_bytes, default=None)


def _signs(flat: Tensor) -> Encoded:
    bits = codecs.encode_positive(flat)
    return Encoded("bits", (bits,), {"relu": partial(codecs.decode_positive, bits, flat.shape, flat.dtype)})


def _reduced(flat: Tensor, sparse: Sparse | None, signs: Encoded | None, lossy: Lossy) -> Encoded:
    """Numbers in a lossy format, all of them or those that are not zero, whichever takes fewer bytes.

    A ReLU reads signs, which small numbers lose when they become zero. Mostly a bitmap of what is not zero has them.
    """
    beside, decoders = ((), {}) if signs is None else (signs.tensors, signs.decoders)
    if sparse is not None:
        places = sparse.tensors[1:]
        has_signs = sparse.counts is None and bool(beside) and torch.equal(sparse.places, beside[0])
        more = () if has_signs else beside
        if BYTES[lossy] * sparse.values.numel() + _size(places + more) < BYTES[lossy] * flat.numel() + _size(beside):
            words = _words(sparse.values, lossy)
            values = partial(_from_words, words, sparse.values.shape, flat.dtype)
            dense = partial(_from_places, sparse.places, sparse.counts, flat.shape, values)
            return Encoded(_named(f"sparse {lossy}", more), (words, *places, *more), _with_numbers(decoders, dense))
    words = _words(flat, lossy)
    whole = partial(_from_words, words, flat.shape, flat.dtype)
    return Encoded(_named(lossy, beside), (words, *beside), _with_numbers(decoders, whole))


def _named(code: str, beside: tuple[Tensor, ...]) -> str:
    return f"bits {code}" if beside else code


def _with_numbers(decoders: dict[Kind, Decoder], numbers: Decoder) -> dict[Kind, Decoder]:
    return {**decoders, **dict.fromkeys(READ_AS_NUMBERS, numbers)}


def _size(tensors: tuple[Tensor, ...]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _words(values: Tensor, lossy: Lossy) -> Tensor:
    if lossy == "fp16":
        return values.to(torch.float16)
    return codecs.encode_fp10(values) if lossy == "fp10" else codecs.encode_fp8(values)


def _from_words(words: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    if words.dtype is torch.float16:
        return words.to(dtype)
    return codecs.decode_fp10(words, shape, dtype) if words.dtype is torch.int32 else codecs.decode_fp8(words, dtype)


def _from_places(places: Tensor, counts: Tensor | None, shape: torch.Size, values: Decoder) -> Tensor:
    return codecs.decode_sparse(Sparse(values(), places, counts, shape))


def _is_within(flat: Tensor, largest: float) -> bool:
    """Whether all numbers are finite and no larger."""
    if not flat.numel():
        return False
    low, high = torch.aminmax(flat)
    return bool((low >= -largest) & (high <= largest))
