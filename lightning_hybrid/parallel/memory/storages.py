"""Storages of saved tensors: which may be held in another form, and whether two tensors of one are the same still."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_hybrid.compat import num_holders, set_versions, version

ALONE = num_holders(torch.empty(1))
"""Holders of a storage that has one tensor."""


class Counter:
    """The counter of writes to a tensor, without its memory.

    Args:
        tensor: The tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self._tensor.data = tensor.new_empty(0)  # has the counter, and none of the memory

    def counts_with(self, tensor: Tensor) -> bool:
        """Whether writes to a tensor of the same storage count here too, so that with equal versions both are equal.

        They do not for all that share memory: chunks by `Tensor.unsafe_chunk`, as gates of `nn.GRU` are, count for
        themselves. No function tells, so the counter is moved for a moment.
        """
        if tensor.is_inference() or self._tensor.is_inference():
            return False
        before, here = version(tensor), version(self._tensor)
        set_versions((self._tensor,), (max(before, here) + 1,))
        counts = version(tensor) != before
        set_versions((self._tensor,), (here,))
        return counts


def is_plain(tensor: Tensor, device: torch.device) -> bool:
    """Whether it is a strided tensor of no subclass, with memory of its own on a device."""
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested
    return plain and tensor.device == device and _has_memory(tensor.untyped_storage())


def _has_memory(storage: torch.UntypedStorage) -> bool:
    """Zeros of forward-mode derivatives and wrappers of `torch.func` have none."""
    try:
        return storage.nbytes() > 0 and storage.data_ptr() != 0
    except RuntimeError:
        return False


def unnumbered(device: torch.device) -> torch.device:
    """A device as tensors have it: processors are one, which some number."""
    return torch.device("cpu") if device.type == "cpu" else device
