"""What blocks save and how long they run, measured while each of them is recomputed."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_hybrid.compat import storage_key
from lightning_hybrid.functional.segments import BlockCost
from lightning_hybrid.parallel.ledgers.fixed import FixedStorages
from lightning_hybrid.parallel.memory.frames import Frame
from lightning_hybrid.parallel.memory.inputs import Arguments


class CostMeter:
    """Measures the calls of blocks; of several calls the largest bytes count, and the least time.

    Args:
        root: The model, whose parameters and buffers do not count.
        number: Of blocks.
        device: Where they compute; it is waited for around each call.

    Attributes:
        costs: By block; None of those that were not called.
        in_flight: Most passes that were alive at once.
    """

    def __init__(self, root: nn.Module, number: int, device: torch.device) -> None:
        self._fixed, self._device = FixedStorages(root), device
        self.costs: list[BlockCost | None] = [None] * number
        self.in_flight = 1
        self._alive = [0] * number
        self._inputs: dict[int, StorageWeakRef] = {}
        self._last = -1

    def start(self) -> None:
        """A new step."""
        self._fixed.start()
        self._alive = [0] * len(self.costs)

    @contextmanager
    def watch(self, position: int, arguments: Arguments, frame: Frame) -> Iterator[Callable[[Tensor], object]]:
        """See `recompute.CallObserver`."""
        if position <= self._last:  # another pass, in which storages of the last one may still be arguments
            self._inputs.clear()
        self._last = position
        new, inputs = self._new_inputs(arguments.saved)
        saved: dict[int, StorageWeakRef] = {}
        internal = saved_inputs = 0

        def seen(tensor: Tensor) -> None:
            nonlocal internal, saved_inputs
            if tensor.layout is not torch.strided or storage_key(tensor) in saved or self._fixed.is_fixed(tensor):
                return
            storage, key = tensor.untyped_storage(), storage_key(tensor)
            saved[key] = StorageWeakRef(storage)
            if key in new:
                saved_inputs += storage.nbytes()
            elif key not in inputs:
                internal += storage.nbytes()

        self._wait()
        start = time.perf_counter()
        yield seen
        self._wait()
        seconds = time.perf_counter() - start
        self._note(position, BlockCost(sum(new.values()), internal, saved_inputs, seconds))
        weakref.finalize(frame, self._gone, position)
        self._alive[position] += 1
        self.in_flight = max(self.in_flight, self._alive[position])

    def _new_inputs(self, tensors: Sequence[Tensor]) -> tuple[dict[int, int], set[int]]:
        """Bytes of arguments that no earlier block of the pass has, by storage, and all storages of arguments."""
        new: dict[int, int] = {}
        strided = [t for t in tensors if t.layout is torch.strided and not self._fixed.is_fixed(t)]
        for tensor in strided:
            key, storage = storage_key(tensor), tensor.untyped_storage()
            known = self._inputs.get(key)
            if known is None or known.expired():
                self._inputs[key] = StorageWeakRef(storage)
                new[key] = storage.nbytes()
        return new, {storage_key(tensor) for tensor in strided}

    def _note(self, position: int, cost: BlockCost) -> None:
        self.costs[position] = merged([self.costs[position], cost])

    def _gone(self, position: int) -> None:
        self._alive[position] -= 1

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)


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
