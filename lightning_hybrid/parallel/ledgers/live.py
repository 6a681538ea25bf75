"""Bytes of storages that come and go, with their peak: gradients, and what becomes of what autograd has saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_hybrid.compat import storage_key

Watch = Callable[[str, int], None]
"""Told of each change: whose bytes, and how many more; fewer are negative."""
Key = tuple[int, int]
"""Storage and offset in it."""


def key_of(tensor: Tensor) -> Key:
    """Where a tensor begins: the same for two names of one tensor."""
    return storage_key(tensor), int(tensor.storage_offset())


def bytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor's elements, at most those of its storage: an expanded tensor has fewer than elements."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


@dataclass
class _Entry:
    num_bytes: int
    owner: str
    storage: StorageWeakRef  # keeps the storage's identity from being used again, not its memory
    references: int = 1


class Counted:
    """What `LiveBytes.add` has begun to count; call it when that ends."""

    def __init__(self, owner: str, end: Callable[[], None] | None = None) -> None:
        self.owner, self._end = owner, end

    def __call__(self) -> None:
        """Release it, once."""
        end, self._end = self._end, None
        if end is not None:
            end()


class LiveBytes:
    """Bytes that are alive now, by owner, and the largest sum since `start`.

    Args:
        outlive: Bytes count until they are released though their storage is freed: they are elsewhere, or avoided.

    Attributes:
        total: Bytes alive now, of what is known to be.
        peak: Largest total.
        at_peak: Bytes by owner at that moment.
    """

    def __init__(self, *, outlive: bool = False) -> None:
        self._entries: dict[Key, _Entry] = {}
        self._outlive, self._watch = outlive, cast(Watch | None, None)
        self.total = self.peak = 0
        self._is_new, self._at_peak = False, dict[str, int]()

    def start(self) -> None:
        """Begin a new peak, from what is alive."""
        self.prune()
        self.peak, self._is_new = self.total, True

    def watch(self, watch: Watch | None) -> None:
        """Tell somebody what is alive, and of every change from now on; None for nobody."""
        self._watch = watch
        if watch is not None:
            for owner, num_bytes in self._by_owner().items():
                watch(owner, num_bytes)

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes by owner when the total was largest."""
        self._keep_peak()
        return dict(self._at_peak)

    def __len__(self) -> int:
        return len(self._entries)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor's storage counts as a whole."""
        return (storage_key(tensor), 0) in self._entries

    def add(self, tensor: Tensor, owner: str, *, whole: bool = False) -> Counted:
        """Count a tensor until it is released as often as it was added, or its storage is freed.

        Args:
            tensor: A tensor with a storage.
            owner: Who gets the bytes, if they are not counted yet.
            whole: Count its storage instead, once for all views of it.

        Returns:
            Releases it.
        """
        key = (storage_key(tensor), 0) if whole else key_of(tensor)
        entry = self._entries.get(key)
        if entry is not None:
            entry.references += 1
        else:
            storage = tensor.untyped_storage()
            entry = _Entry(storage.nbytes() if whole else bytes_of(tensor), owner, StorageWeakRef(storage))
            if self.total + entry.num_bytes > self.peak:
                self.prune()
            self._entries[key] = entry
            self._change(owner, entry.num_bytes)
            if self.total > self.peak:  # who holds it is written down when something goes
                self.peak, self._is_new = self.total, True
        return Counted(entry.owner, partial(self._release, key, entry))

    def discard(self, tensor: Tensor) -> None:
        """Stop counting a tensor's storage, which counts as a whole or not at all."""
        if self.holds(tensor):
            self._remove((storage_key(tensor), 0))

    def prune(self) -> None:
        """Notice which storages have been freed."""
        if self._outlive:
            return
        for key in [key for key, entry in list(self._entries.items()) if entry.storage.expired()]:
            self._remove(key)

    def _release(self, key: Key, entry: _Entry) -> None:
        entry.references -= 1
        if not entry.references and self._entries.get(key) is entry:
            self._remove(key)

    def _remove(self, key: Key) -> None:
        self._keep_peak()
        entry = self._entries.pop(key)
        self._change(entry.owner, -entry.num_bytes)

    def _change(self, owner: str, num_bytes: int) -> None:
        self.total += num_bytes
        if self._watch is not None:
            self._watch(owner, num_bytes)

    def _keep_peak(self) -> None:
        if self._is_new:
            self._is_new, self._at_peak = False, self._by_owner()

    def _by_owner(self) -> dict[str, int]:
        sums: dict[str, int] = {}
        for entry in list(self._entries.values()):  # a graph may be freed meanwhile
            sums[entry.owner] = sums.get(entry.owner, 0) + entry.num_bytes
        return sums
