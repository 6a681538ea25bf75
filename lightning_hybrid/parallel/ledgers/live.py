"""Bytes of storages that come and go, with their peak: gradients, and what autograd has saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_hybrid.compat import storage_key

Release = Callable[[], None]
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


class LiveBytes:
    """Bytes that are alive now, by owner, and the largest sum since `start`.

    Attributes:
        total: Bytes alive now, of what is known to be.
        peak: Largest total.
        at_peak: Bytes by owner at that moment.
    """

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry] = {}
        self.total = self.peak = 0
        self._is_new, self._at_peak = False, dict[str, int]()

    def start(self) -> None:
        """Begin a new peak, from what is alive."""
        self._prune()
        self.peak, self._is_new = self.total, True

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes by owner when the total was largest."""
        self._keep_peak()
        return dict(self._at_peak)

    def add(self, tensor: Tensor, owner: str, *, whole: bool = False) -> Release:
        """Count a tensor until it is released as often as it was added, or its storage is freed.

        Args:
            tensor: A tensor with a storage.
            owner: Who gets the bytes, if they are not counted yet.
            whole: Count its storage instead, once for all views of it.

        Returns:
            Releases it.
        """
        key = (storage_key(tensor), 0) if whole else key_of(tensor)
        found = self._entries.get(key)
        if found is not None:
            found.references += 1
            return partial(self._release, key, found)
        storage = tensor.untyped_storage()
        entry = _Entry(storage.nbytes() if whole else bytes_of(tensor), owner, StorageWeakRef(storage))
        if self.total + entry.num_bytes > self.peak:
            self._prune()
        self._entries[key] = entry
        self.total += entry.num_bytes
        if self.total > self.peak:  # who holds it is written down when something goes
            self.peak, self._is_new = self.total, True
        return partial(self._release, key, entry)

    def _release(self, key: Key, entry: _Entry) -> None:
        entry.references -= 1
        if not entry.references and self._entries.get(key) is entry:
            self._remove(key)

    def _prune(self) -> None:
        for key in [key for key, entry in list(self._entries.items()) if entry.storage.expired()]:
            self._remove(key)

    def _remove(self, key: Key) -> None:
        self._keep_peak()
        self.total -= self._entries.pop(key).num_bytes

    def _keep_peak(self) -> None:
        if self._is_new:
            self._is_new, self._at_peak = False, {}
            for entry in list(self._entries.values()):  # a graph may be freed meanwhile
                self._at_peak[entry.owner] = self._at_peak.get(entry.owner, 0) + entry.num_bytes
