"""What blocks save and how long they run, measured while each of them is recomputed."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_hybrid.compat import storage_key
from lightning_hybrid.functional.segments import BlockCost
from lightning_hybrid.parallel.ledgers.fixed import FixedStorages
from lightning_hybrid.parallel.memory.frames import Frame, Site
from lightning_hybrid.parallel.memory.inputs import Arguments


@dataclass
class _Call:
    """Bytes of storages, by storage."""

    position: int
    new: dict[int, int] = field(default_factory=dict)  # arguments that no other block of the pass has
    shared: dict[int, int] = field(default_factory=dict)  # of the first call: arguments of several blocks of the pass
    saved: dict[int, StorageWeakRef] = field(default_factory=dict)
    internal: int = 0
    seconds: float = 0.0

    @property
    def cost(self) -> BlockCost:
        """What several blocks get is there whatever is recomputed, and so counts with the first block alone."""
        shared = sum(self.shared.values())
        saved_inputs = sum(num_bytes for key, num_bytes in self.new.items() if key in self.saved)
        return BlockCost(sum(self.new.values()) + shared, self.internal, saved_inputs + shared, self.seconds)


class CostMeter:
    """Measures the calls of blocks; of several calls the largest bytes count, and the least time.

    Args:
        root: The model, whose parameters and buffers do not count.
        sites: The blocks.
        device: Where they compute; it is waited for around each call.

    Attributes:
        in_flight: Most passes that were alive at once.
    """

    def __init__(self, root: nn.Module, sites: Sequence[Site], device: torch.device) -> None:
        self._fixed, self._device = FixedStorages(root), device
        self._costs: list[BlockCost | None] = [None] * len(sites)
        self._sites, self.in_flight = sites, 1
        self._alive = [0] * len(sites)
        self._pass: list[_Call] = []
        self._inputs: dict[int, tuple[StorageWeakRef, _Call]] = {}  # with the call that got it first

    @property
    def costs(self) -> list[BlockCost | None]:
        """By block; None of those that were not called."""
        self._end_pass()
        return self._costs

    def start(self) -> None:
        """A new step."""
        self._fixed.start()
        self._alive = [0] * len(self._alive)

    @contextmanager
    def watch(self, position: int, arguments: Arguments, frame: Frame) -> Iterator[Callable[[Tensor], object]]:
        """See `recompute.CallObserver`."""
        if self._pass and position <= self._pass[-1].position:
            self._end_pass()
        call = _Call(position, internal=self._sites[position].buffers.num_bytes)
        self._pass.append(call)
        inputs = self._note_inputs(call, arguments.saved)

        def seen(tensor: Tensor) -> None:
            if tensor.layout is not torch.strided or self._fixed.is_fixed(tensor):
                return
            key, storage = storage_key(tensor), tensor.untyped_storage()
            if key not in call.saved:
                call.saved[key] = StorageWeakRef(storage)
                call.internal += storage.nbytes() if key not in inputs else 0

        self._wait()
        start = time.perf_counter()
        yield seen
        self._wait()
        call.seconds = time.perf_counter() - start
        alive = self._alive  # those of another step may end later
        alive[position] += 1
        weakref.finalize(frame, _gone, alive, position).atexit = False
        self.in_flight = max(self.in_flight, alive[position])

    def _note_inputs(self, call: _Call, tensors: Sequence[Tensor]) -> set[int]:
        """Storages of arguments."""
        keys = set[int]()
        for tensor in tensors:
            if tensor.layout is not torch.strided or self._fixed.is_fixed(tensor):
                continue
            key, storage = storage_key(tensor), tensor.untyped_storage()
            keys.add(key)
            known, first = self._inputs.get(key, (None, call))
            if known is None or known.expired():
                self._inputs[key] = StorageWeakRef(storage), call
                call.new[key] = storage.nbytes()
            elif first is not call and key in first.new:
                self._pass[0].shared[key] = first.new.pop(key)
        return keys

    def _end_pass(self) -> None:
        """In another pass, storages of the last one may still be arguments."""
        for call in self._pass:
            self._costs[call.position] = merged([self._costs[call.position], call.cost])
        self._pass.clear()
        self._inputs.clear()

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)


def _gone(alive: list[int], position: int) -> None:
    alive[position] -= 1


def merged(costs: Sequence[BlockCost | None]) -> BlockCost | None:
    """Of each kind of bytes the most, and the least time; None without any."""
    found = [cost for cost in costs if cost is not None]
    if not found:
        return None
    return BlockCost(
        max(cost.boundary for cost in found),
        max(cost.internal for cost in found),
        max(cost.saved_inputs for cost in found),
        min(cost.seconds for cost in found),
    )
