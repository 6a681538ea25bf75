"""One storage that graphs need, as it was when it was saved: on the device, in host memory, or on its way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_hybrid.compat import version
from lightning_hybrid.parallel.ledgers.fates import Announcement, Kept, announce
from lightning_hybrid.parallel.memory.offload_copies import Copies, Geometry, all_bytes
from lightning_hybrid.parallel.memory.storages import Counter


class Stored:
    """A storage and version of it; whoever saves either of its views shares it.

    It stays on the device until `move` is called. From then on its first memory there is held until `settle`, for the
    copy; later memory comes by `bring` and goes by `release`.

    Args:
        tensor: Any view of it, as autograd saves it.
        copies: How it moves.
        closed: Called with it when no graph needs it any more.
    """

    def __init__(self, tensor: Tensor, copies: Copies, closed: Callable[[Stored], object]) -> None:
        self._copies, self._closed = copies, closed
        self._identity = StorageWeakRef(tensor.untyped_storage())  # no other storage gets it meanwhile
        # the version is that of all views, and the check that of autograd
        self._original: Kept | None = Kept(tensor.detach(), version(tensor))
        self._counter = Counter(tensor)
        self._bytes: Tensor | None = all_bytes(tensor.untyped_storage())
        self.num_bytes = self._bytes.numel()
        self._host: Tensor | None = None
        self._arrival: Any = None
        self._copied: Any = None
        self._is_leaving = False
        self._holders = self._users = 0
        self._here = announce(tensor, "kept")
        self._offloaded: Announcement | None = None

    def counts_with(self, tensor: Tensor) -> bool:
        """Whether writes to a tensor of the storage count for what is here."""
        return self._counter.counts_with(tensor)

    @property
    def moves(self) -> bool:
        """Whether its place is host memory."""
        return self._host is not None

    def move(self) -> None:
        """Begin to copy it to host memory; it is on the device until `settle`.

        Raises:
            RuntimeError: If it has been written to since it was saved.
        """
        assert self._original is not None
        assert self._bytes is not None
        self._original.unpack()
        self._offloaded = announce(self._original.tensor, "offloaded", self._here)
        self._host, self._copied = self._copies.to_host(self._bytes)
        self._is_leaving = True

    def settle(self) -> None:
        """Wait for the copy to host memory, and let go of the memory that was copied; `release` does if it is held."""
        if self._is_leaving and not self._holders:
            self._is_leaving = False
            self._copies.wait(self._copied)
            self._drop()

    def hold(self) -> None:
        """Let none of it go that is here or is brought; `release` as often."""
        self._holders += 1

    def bring(self) -> None:
        """Begin to bring back what is not here."""
        if self._bytes is None:
            assert self._host is not None
            self._bytes, self._arrival = self._copies.to_device(self._host)
            self._here = announce(self._bytes, "kept", self._here)

    def release(self) -> None:
        """Somebody who held it needs it no more."""
        self._holders -= 1
        if not self._holders and self.moves:
            self.settle()
            self._drop()

    def view(self, geometry: Geometry) -> Tensor:
        """A view of what is here, held.

        Raises:
            RuntimeError: If it was written to while its first memory was held.
        """
        if self._original is not None:
            self._original.unpack()
        assert self._bytes is not None
        self._copies.wait(self._arrival)
        self._arrival = None
        return geometry.view(self._bytes.untyped_storage())

    def join(self) -> None:
        """One more needs it; `leave` as often."""
        self._users += 1

    def leave(self) -> None:
        """One less needs it; after the last it is gone."""
        self._users -= 1
        if not self._users:
            self._close()

    def _drop(self) -> None:
        """Let go of the memory on the device if nobody holds it."""
        if self._holders or self._bytes is None:
            return
        self._copies.wait(self._arrival)  # what arrives unused must arrive before others get its memory
        self._arrival = None
        if self._original is not None and version(self._original.tensor) == self._original.version:
            self._original = None  # the copy was made of what had been saved; else it stays, to say so
        self._bytes = None
        self._here()

    def _close(self) -> None:
        self._holders = 0
        self.settle()
        self._drop()
        if self._host is not None:
            self._copies.pool.give_back(self._host)
        if self._offloaded is not None:
            self._offloaded()
        self._closed(self)
