"""A safetensors file whose tensors are written in parts.

The library's own `save_file` wants all tensors in memory at once. The format is small enough to be written here: the
length of the header (8 bytes, little endian), the header in JSON, and the elements of one tensor after the other.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_hybrid.functional.boxes import Box
from lightning_hybrid.parallel.checkpoint.hollow import Hole, Hollow, write_at

ALIGNMENT = 8  # bytes; the header is filled up with spaces, so that elements of all types can be mapped

TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class HollowSafetensors(Hollow):
    """A safetensors file, written as its tensors' parts arrive.

    Args:
        path: The file's.
        tensors: Shape and type of each.
        metadata: What the header says beside them.

    Raises:
        OSError: If the file cannot be written.
        ValueError: If the format has no such type.

    Source: https://github.com/huggingface/safetensors, section "Format".
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        metadata: Mapping[str, str],
    ) -> None:
        assert sys.byteorder == "little", "the format keeps the least significant byte first"
        self._tensors = tensors
        header, places = _layout(tensors, metadata)
        super().__init__(path)
        self.holes = {name: Hole(begin, end - begin) for name, (begin, end) in places.items()}
        try:
            write_at(self.file.fileno(), 0, memoryview(header))
        except BaseException:
            self.discard()
            raise

    def write(self, name: str, box: Box, data: Tensor) -> None:
        """Write a part of a tensor.

        Args:
            name: The tensor's.
            box: Which part.
            data: Its elements, on any device, of the box's sizes.

        Raises:
            OSError: If the disk is full.
            TypeError: If the elements are of another type.
        """
        shape, dtype = self._tensors[name]
        if data.dtype != dtype:
            raise TypeError(f"A part of {name}, a tensor of {dtype}, is of {data.dtype}.")
        self.fill(name, shape, box, data)


def _layout(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """What stands before the elements, and each tensor's bytes [begin, end) in the file."""
    unknown = [f"{name} ({dtype})" for name, (_, dtype) in tensors.items() if dtype not in TYPES]
    if unknown:
        raise ValueError(f"safetensors has no type for {', '.join(unknown[:3])}. Write a .ckpt file instead.")
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    places, end = {}, 0
    # the widest types first, so that every tensor begins at a multiple of its elements' size
    for name, (shape, dtype) in sorted(tensors.items(), key=lambda item: -item[1][1].itemsize):
        begin, end = end, end + Box.of(shape).numel * dtype.itemsize
        entries[name] = {"dtype": TYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        places[name] = begin, end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {
        n: (start + begin, start + end) for n, (begin, end) in places.items()
    }
