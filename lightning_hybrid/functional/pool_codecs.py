"""Indices of two-dimensional max-pools in half a byte each (Jain et al. 2018, Gist, section IV)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hybrid.functional.codecs import CHUNK


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
        """Places that fit into a byte: 2 of windows of up to 16 elements, 1 of up to 256, else 0.

        It is 0, too, where padding lets a window reach beyond the place in the next row straight below its first:
        then an index does not tell its row from others.
        """
        area = self.kernel[0] * self.kernel[1]
        if (self.kernel[1] - 1) * self.dilation[1] >= self.dilation[0] * self.width:
            return 0
        return 2 if area <= 16 else int(area <= 256)


def encode_argmax(indices: Tensor, window: Window) -> Tensor:
    """Places of the largest elements within their windows.

    Args:
        indices: As `max_pool2d` gives them, int64 ``[..., height, width]`` of the output.
        window: Its geometry, with `per_byte` of 1 or 2.

    Returns:
        uint8, two to a byte for windows of up to 16 elements.
    """
    codes = torch.empty(indices.shape, dtype=torch.uint8, device=indices.device)
    starts, row = _starts(indices.shape, window, indices.device), window.dilation[0] * window.width
    for part, places in zip(_planes(indices), _planes(codes), strict=True):
        local = (part - starts).to(torch.int32)
        rows = sum((local >= row * number for number in range(1, window.kernel[0])), torch.zeros_like(local))
        places.copy_((local - rows * row).div_(window.dilation[1], rounding_mode="floor") + rows * window.kernel[1])
    flat = codes.view(-1)
    if window.per_byte == 1:
        return flat
    first, second = torch.nn.functional.pad(flat, (0, flat.numel() % 2)).view(-1, 2).unbind(1)
    return first | second << 4


def decode_argmax(encoded: Tensor, shape: torch.Size, window: Window, out: Tensor | None = None) -> Tensor:
    """The indices again, int64 of that shape; in `out` if it is given, which may have any strides."""
    codes = encoded if window.per_byte == 1 else torch.stack([encoded & 15, encoded >> 4], 1).view(-1)
    indices = torch.empty(shape, dtype=torch.int64, device=encoded.device) if out is None else out
    rows, columns = (
        torch.arange(size, device=encoded.device) * step
        for size, step in zip(window.kernel, window.dilation, strict=True)
    )
    within, starts = (rows[:, None] * window.width + columns).view(-1), _starts(shape, window, encoded.device)
    for part, decoded in zip(_planes(codes[: shape.numel()].view(shape)), _planes(indices), strict=True):
        decoded.copy_(within.index_select(0, part.reshape(-1).int()).view(part.shape).add_(starts))
    return indices


def _planes(tensor: Tensor) -> Iterator[Tensor]:
    """Of ``[..., height, width]`` some planes at a time, alike for all strides; a piece has one or more."""
    if tensor.ndim == 2:
        yield tensor
    elif tensor.numel() and (tensor.ndim == 3 or tensor[0].numel() <= CHUNK):
        yield from tensor.split(max(1, CHUNK // tensor[0].numel()))
    elif tensor.numel():
        for part in tensor:
            yield from _planes(part)


def _starts(shape: torch.Size, window: Window, device: torch.device) -> Tensor:
    """Index of each window's first element, which may lie in the padding, ``[height, width]``."""
    rows, columns = (
        torch.arange(size, device=device) * stride - padding
        for size, stride, padding in zip(shape[-2:], window.stride, window.padding, strict=True)
    )
    return rows[:, None] * window.width + columns
