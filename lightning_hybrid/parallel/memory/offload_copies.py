"""Storages on their way between a device and host memory.

Where there is an accelerator, copies run on a stream of their own, from and to pinned memory, and only the stream that
computes ever waits for one. On the CPU both ends lie in the same memory, and copies are done at once.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_hybrid.compat import negative_view


class Geometry(NamedTuple):
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conjugate: bool
    is_negative: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Geometry:
        """That of a strided tensor."""
        offset = int(tensor.storage_offset())
        return cls(tensor.dtype, tensor.size(), tensor.stride(), offset, tensor.is_conj(), tensor.is_neg())

    def view(self, storage: torch.UntypedStorage) -> Tensor:
        """A tensor that lies so in a storage."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        tensor = tensor.conj() if self.is_conjugate else tensor
        return negative_view(tensor) if self.is_negative else tensor


def all_bytes(storage: torch.UntypedStorage) -> Tensor:
    """A whole storage, uint8 ``[bytes]``."""
    return Geometry(torch.uint8, torch.Size([storage.nbytes()]), (1,), 0, False, False).view(storage)


class HostPool:
    """Buffers in host memory that are used again, by size: to pin memory takes longer than to copy into it.

    Args:
        pinned: Whether they are pinned, which copies beside a computation need.

    Attributes:
        num_made: Buffers made so far.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned, self.num_made = pinned, 0
        self._free: dict[int, list[Tensor]] = {}
        self._out, self._most = Counter[int](), Counter[int]()

    def take(self, num_bytes: int) -> Tensor:
        """A buffer, uint8 ``[num_bytes]``, with whatever is in it."""
        self._out[num_bytes] += 1
        self._most[num_bytes] = max(self._most[num_bytes], self._out[num_bytes])
        free = self._free.get(num_bytes)
        if free:
            return free.pop()
        self.num_made += 1
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)

    def give_back(self, buffer: Tensor) -> None:
        """Nobody needs it any more; copies from or to it may still wait in the stream that later ones use too."""
        self._out[buffer.numel()] -= 1
        self._free.setdefault(buffer.numel(), []).append(buffer)

    def trim(self) -> None:
        """Let go of buffers that were not needed since the last call, so that changing shapes pile up none."""
        for size, buffers in list(self._free.items()):
            del buffers[max(0, self._most[size] - self._out[size]) :]
            if not buffers:
                del self._free[size]
        self._most = Counter(+self._out)


class Copies:
    """Copies in both directions, in the order in which they are asked for.

    Args:
        device: Where computations run.

    Attributes:
        pool: The host buffers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: Any = torch.get_device_module(device)
        has_streams = device.type != "cpu" and hasattr(self._streams, "Stream")
        self._side = self._streams.Stream(device) if has_streams else None
        self.pool = HostPool(pinned=self._side is not None)

    def to_host(self, source: Tensor) -> tuple[Tensor, Any]:
        """Begin to copy bytes that the current stream has computed, or has still to compute.

        Returns:
            A host buffer, and what `wait` needs. Until after that the source must neither be freed nor written to.
        """
        buffer = self.pool.take(source.numel())
        return buffer, self._copy(source, buffer)

    def to_device(self, buffer: Tensor) -> tuple[Tensor, Any]:
        """Begin to copy bytes back, into new memory.

        Returns:
            Bytes on the device, and what `wait` needs. Until after that they must be neither used nor freed.
        """
        bytes_there = torch.empty(buffer.numel(), dtype=torch.uint8, device=self._device)
        return bytes_there, self._copy(buffer, bytes_there)

    def wait(self, event: Any) -> None:
        """Let the current stream, not the process, wait until a copy is done."""
        if event is not None:
            self._streams.current_stream(self._device).wait_event(event)

    def _copy(self, source: Tensor, target: Tensor) -> Any:
        if self._side is None:
            target.copy_(source)
            return None
        # what fills the source, or has used the target's memory before, is in this stream
        self._side.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(self._side):
            target.copy_(source, non_blocking=True)
            return self._side.record_event()
