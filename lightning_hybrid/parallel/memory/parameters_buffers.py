"""A bounded number of buffers on the device, through which units of parameters stream."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.compat import num_holders, storage_key, unseen
from lightning_hybrid.parallel.memory.parameters_order import AccessOrder
from lightning_hybrid.parallel.memory.parameters_transfers import Transfers
from lightning_hybrid.parallel.memory.parameters_units import Unit, state_of


@dataclass
class StreamCounts:
    """What has happened since the beginning; an access is a run of reads of one unit.

    Attributes:
        accesses: Times that a unit was needed which was not the one before.
        hits: Of these, times that a buffer still had it.
        prefetched: Times that a copy had been started ahead.
        fetches: Copies of a unit to the device.
        waits: Times that computation had to wait: a copy was not started ahead, or was not done.
    """

    accesses: int = 0
    hits: int = 0
    prefetched: int = 0
    fetches: int = 0
    waits: int = 0


@dataclass(eq=False)
class Buffer:
    """Memory for one unit at a time, uint8 `[bytes]`."""

    memory: Tensor
    unit: Unit | None = None
    state: list[tuple[Any, ...]] = field(default_factory=list)
    ready: Any = None
    is_used: bool = False
    time: int = 0

    def __post_init__(self) -> None:
        self._holders = num_holders(self.memory)

    @property
    def is_busy(self) -> bool:
        """Whether anything refers to what is in it: a module that runs, a backward function, or the user."""
        return num_holders(self.memory) > self._holders

    def has(self, unit: Unit) -> bool:
        """Whether the unit is in it, or on its way, as it is on the host now."""
        return self.unit is unit and self.state == state_of(unit.regions())


class Buffers:
    """They.

    Args:
        units: What streams.
        number: How many buffers, at least 2.
        transfers: Copies.
    """

    def __init__(self, units: Sequence[Unit], number: int, transfers: Transfers) -> None:
        self._transfers = transfers
        self.order, self.counts = AccessOrder[Unit](), StreamCounts()
        num_bytes, number = max(unit.num_bytes for unit in units), min(number, max(2, len(units)))
        with torch.inference_mode(False), torch.no_grad():
            memories = [torch.empty(num_bytes, dtype=torch.uint8, device=transfers.device) for _ in range(number)]
        self.all = [Buffer(memory) for memory in memories]
        self._by_storage = {storage_key(buffer.memory): buffer for buffer in self.all}
        self._time = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(buffer.memory.nbytes for buffer in self.all)

    def of(self, storage: int | None) -> Buffer | None:
        """The buffer with a storage, by `storage_key`."""
        return None if storage is None else self._by_storage.get(storage)

    def begin(self, kind: str) -> None:
        """A new iteration: whatever has been written to parameters meanwhile, copies from before do not count.

        None is made before the first access: hooks and the step's first lines may still write, past any version.
        """
        self.order.begin(kind)
        self.invalidate()

    def invalidate(self) -> None:
        """Parameters have changed on the host, perhaps in a way that no version tells."""
        for buffer in self.all:
            buffer.unit = None

    def access(self, unit: Unit) -> Buffer:
        """The buffer that has a unit, for computation that is asked for from now on.

        Raises:
            RuntimeError: If all buffers are in use.
        """
        is_new = self.order.note(unit)
        buffer = next((buffer for buffer in self.all if buffer.has(unit)), None)
        if buffer is not None and buffer.is_used and not is_new:
            return buffer
        self.counts.accesses += 1
        if buffer is None:
            buffer = self._free_for(unit)
            self._load(buffer, unit)
            self.counts.waits += 1
            self._transfers.wait(buffer.ready)
        else:
            self.counts.hits += buffer.is_used
            self.counts.prefetched += not buffer.is_used
            self.counts.waits += self._transfers.wait(buffer.ready)
        self._time += 1
        buffer.is_used, buffer.time = True, self._time
        self._prefetch()
        return buffer

    def _prefetch(self) -> None:
        """Start to copy what is expected next, into buffers that have nothing of it."""
        wanted = self.order.ahead(len(self.all))
        for unit in wanted:
            if not any(buffer.has(unit) for buffer in self.all) and unit.regions():
                buffer = self._least_recent([b for b in self.all if b.unit not in wanted and not b.is_busy])
                if buffer is None:
                    return
                self._load(buffer, unit)

    def _free_for(self, unit: Unit) -> Buffer:
        buffer = self._least_recent([buffer for buffer in self.all if not buffer.is_busy])
        if buffer is None:
            gc.collect()  # an exception that was handled may have left a cycle
            buffer = self._least_recent([buffer for buffer in self.all if not buffer.is_busy])
        if buffer is None:
            names = [buffer.unit.name for buffer in self.all if buffer.unit is not None]
            raise RuntimeError(
                f"{unit.name} needs a buffer, and all {len(self.all)} are in use, by {', '.join(names) or 'a graph'}: "
                "modules that run within each other, a parameter that was stored as an attribute or kept by a hook "
                "while its module ran, or a double backward pass. Clone what is kept, or raise num_buffers."
            )
        return buffer

    @staticmethod
    def _least_recent(buffers: list[Buffer]) -> Buffer | None:
        return min(buffers, key=lambda buffer: (buffer.unit is not None, buffer.time), default=None)

    def _load(self, buffer: Buffer, unit: Unit) -> None:
        regions = unit.regions()
        if regions and regions[-1].end > buffer.memory.nbytes:
            raise RuntimeError(
                f"{unit.name} has {regions[-1].end} bytes of parameters, and buffers were made for at most "
                f"{buffer.memory.nbytes}: it has grown since training began. Change the model before fit."
            )

        def copy() -> None:
            for region in regions:
                region.within(buffer.memory).copy_(region.parameter, non_blocking=True)

        buffer.unit, buffer.state, buffer.is_used = unit, state_of(regions), False
        with torch.no_grad(), unseen():  # copies are no part of what a selective checkpoint runs again
            buffer.ready = self._transfers.start(copy)
        self.counts.fetches += 1
