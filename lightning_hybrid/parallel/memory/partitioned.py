"""Kept arguments of recomputed blocks, dealt out over the tensor axis, in contiguous memory.

Every rank of a tensor axis has the same hidden states, so each keeps a part of them and they are gathered before they
are used again: P_a of Rajbhandari et al. 2020 (arXiv:1910.02054, section 6.1). The parts live long among what comes and
goes, and so lie in memory of their own (M_D, section 6.3).
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_hybrid.compat import all_gather_flat, storage_key
from lightning_hybrid.parallel.ledgers.fates import announce
from lightning_hybrid.parallel.memory.hooks import ChainedHooks
from lightning_hybrid.parallel.memory.inputs import place_of

Size = tuple[torch.device, torch.dtype, int]


class ContiguousBuffers:
    """Slots that come back by size; once it is known how many are in use together, they lie side by side.

    What is asked for beyond those, as by a batch of another shape, is new memory each time, so that none piles up.
    """

    def __init__(self) -> None:
        self._free: defaultdict[Size, list[Tensor]] = defaultdict(list)
        self._used, self._most = Counter[Size](), Counter[Size]()
        self._pieces = set[int]()  # storages of what lies side by side; empty until it does

    def take(self, device: torch.device, dtype: torch.dtype, number: int) -> Tensor:
        """A flat tensor, to be given back by `give`."""
        size = device, dtype, number
        if not self._pieces:
            self._used[size] += 1
            self._most[size] = max(self._most[size], self._used[size])
        free = self._free.get(size)
        return free.pop() if free else torch.empty(number, device=device, dtype=dtype)

    def give(self, slot: Tensor) -> None:
        """Take a slot back."""
        size = slot.device, slot.dtype, slot.numel()
        if not self._pieces:
            self._used[size] -= 1
        if not self._pieces or storage_key(slot) in self._pieces:
            self._free[size].append(slot)

    def settle(self) -> None:
        """After a first step: put all slots into one piece of memory for each type."""
        if self._pieces or any(self._used.values()) or not self._most:
            return
        self._free.clear()
        for device, dtype in {(device, dtype) for device, dtype, _ in self._most}:
            mine = {size: most for size, most in self._most.items() if size[:2] == (device, dtype)}
            numbers = [size[2] for size, most in mine.items() for _ in range(most)]
            piece = torch.empty(sum(numbers), device=device, dtype=dtype)
            self._pieces.add(storage_key(piece))
            for slot in piece.split(numbers):
                self._free[device, dtype, slot.numel()].append(slot)


class _Part:
    """What a graph holds of a tensor that all ranks of the axis have."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup, buffers: ContiguousBuffers) -> None:
        self._group, self._buffers = group, buffers
        self._shape, self._stride, number = tensor.shape, tensor.stride(), tensor.numel()
        length = ceil(number / group.size())
        start = min(number, length * group.rank())
        mine = tensor.detach().as_strided((number,), (1,))[start : start + length]
        self._slot = buffers.take(tensor.device, tensor.dtype, length)
        self._slot[: mine.numel()].copy_(mine)
        self._release = announce(self._slot, "kept")

    def __del__(self) -> None:
        self._release()
        self._buffers.give(self._slot)

    def unpack(self) -> Tensor:
        """Gather the tensor, in the memory order that it had."""
        whole = self._slot.new_empty(self._slot.numel() * self._group.size())
        all_gather_flat(whole, self._slot, self._group)
        return whole.as_strided(self._shape, self._stride)


class Partition:
    """Deals out kept arguments.

    Args:
        group: The ranks of the tensor axis.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.buffers = group, ContiguousBuffers()
        self._known: dict[object, tuple[StorageWeakRef, Callable[[], _Part | None]]] = {}

    @contextmanager
    def saving(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Context in which those of `tensors` that require a gradient are dealt out if autograd saves them."""
        mine = {storage_key(tensor) for tensor in tensors if tensor.requires_grad and is_dense(tensor)}

        def pack(tensor: Tensor) -> _Part | None:
            return self._part(tensor) if storage_key(tensor) in mine and is_dense(tensor) else None

        with ChainedHooks(pack):
            yield

    def _part(self, tensor: Tensor) -> _Part:
        """One for each tensor, also if several blocks are given it."""
        place = place_of(tensor)
        storage, known = self._known.get(place, (None, lambda: None))
        part = known() if storage is not None and not storage.expired() else None
        if part is None:
            part = _Part(tensor, self._group, self.buffers)
            self._known = {key: entry for key, entry in self._known.items() if not entry[0].expired()}
            self._known[place] = StorageWeakRef(tensor.untyped_storage()), weakref.ref(part)
        return part


def is_dense(tensor: Tensor) -> bool:
    """Whether each place of a tensor's piece of memory is one element of it; no dispatch mode sees the question."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True
