"""Normal noise on tensors of any size: the same numbers for the same element, whichever part of a tensor is here."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from lightning_hybrid.functional.boxes import Box

BLOCK = 2**18
"""Most elements that are drawn together: a megabyte, and one start of a generator."""


def noise_deviation(step: int, eta: float, gamma: float) -> float:
    """Standard deviation of annealed noise, whose variance is eta / (1 + step) ** gamma.

    Args:
        step: Steps that have been applied before, from 0.
        eta: Variance at step 0, in squared units of gradients.
        gamma: Power with which it falls.

    Source: Neelakantan et al. 2015, arXiv:1511.06807, section 3, equation 2.
    """
    return math.sqrt(eta * float(1 + step) ** -gamma)  # a large power of a number above 1 overflows, and this does not


@torch.no_grad()
def add_noise(
    target: Tensor, shape: Sequence[int], box: Box, deviation: float, key: Sequence[object], *, block: int = BLOCK
) -> None:
    """Add normal noise to a part of a tensor, in place.

    The whole is cut into blocks, and each has a generator of its own, started from the key and the block's place. So
    the noise of an element is that of the whole, whatever box it is added with. No more than a block is in memory.

    Args:
        target: The part, a real tensor with the sizes of `box`; its device draws.
        shape: The whole's.
        box: Where the part lies in the whole.
        deviation: Standard deviation. Noise is made in float32, and rounded once to the target's type.
        key: What the numbers depend on besides the kind of device; its `repr` counts.
        block: Most elements of a block; other sizes give other numbers.
    """
    for piece in Box.of(shape).cut(block):
        common = piece.meet(box)
        if common is not None:
            noise = common.within(piece).view(draw(piece.sizes, (*key, piece.offsets), target.device))
            common.within(box).view(target).add_((noise * deviation).to(target.dtype))


def draw(shape: Sequence[int], key: Sequence[object], device: torch.device) -> Tensor:
    """Standard normal numbers that depend on a key and the kind of device.

    On the CPU NumPy draws: torch's generator there starts from 32 bits of its seed, in which the keys of many blocks
    would meet.

    Args:
        shape: Of the result.
        key: Its `repr` counts.
        device: Where the result is.

    Returns:
        A float32 tensor.
    """
    seed = int.from_bytes(hashlib.blake2b(repr(tuple(key)).encode(), digest_size=16).digest(), "little")
    if device.type == "cpu":
        generator = numpy.random.Generator(numpy.random.SFC64(seed))
        return torch.from_numpy(numpy.asarray(generator.standard_normal(tuple(shape), dtype=numpy.float32)))
    started = torch.Generator(device).manual_seed(seed >> 65)
    return torch.randn(*shape, generator=started, device=device, dtype=torch.float32)
