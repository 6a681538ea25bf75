"""A saved storage that is whole for as long as the forward pass uses it, then encoded, and decoded for backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_hybrid.compat import backward_pass, num_holders, storage_key, version
from lightning_hybrid.parallel.ledgers.fates import Announcement, Kept, announce
from lightning_hybrid.parallel.memory.encoding import Codec, Decoder, Encoded, encode
from lightning_hybrid.parallel.memory.hooks import Packed
from lightning_hybrid.parallel.memory.offload_copies import Geometry
from lightning_hybrid.parallel.memory.savers import Kind, Saver
from lightning_hybrid.parallel.memory.storages import ALONE, Counter

NO_PASS = -1


class Compressed:
    """A storage and version of it; whoever saves any of its views shares it.

    Args:
        tensor: Any view of it, as autograd saves it.
        module: Dotted name of the module that saved it first.
        codec: What may be done to it.
        closed: Called with it when no graph needs it any more.

    Attributes:
        module: As given.
        key: Identity of the storage, as `compat.storage_key`; no other gets it meanwhile.
        num_bytes: Of the storage.
        savers: Who saved it, and how their tensors lie in it.
        encoded: What is kept of it, once it is encoded.
        is_settled: Whether it has been encoded or passed on.
        is_closed: Whether no graph needs it any more.
    """

    def __init__(self, tensor: Tensor, module: str, codec: Codec, closed: Callable[[Compressed], object]) -> None:
        self.module, self._codec, self._closed = module, codec, closed
        self.key, self._identity = storage_key(tensor), StorageWeakRef(tensor.untyped_storage())
        self._original: Kept | None = Kept(tensor.detach(), version(tensor))
        self._counter, self._device = Counter(tensor), tensor.device
        self.num_bytes = tensor.untyped_storage().nbytes()
        self.encoded: Encoded | None = None
        self.is_settled = self.is_closed = False
        self.savers: list[tuple[Saver, Geometry]] = []
        self._passed: dict[Geometry, Packed] = {}
        self._uses: dict[int, Kind] = {}
        self._backward, self._awaited, self._dense = NO_PASS, set[int](), dict[Decoder, Tensor]()
        self._here, self._there = announce(tensor, "kept"), list[Announcement]()

    def counts_with(self, tensor: Tensor) -> bool:
        """Whether with equal versions a tensor of the storage is as it was saved here."""
        return self._original is not None and self._counter.counts_with(tensor)

    @property
    def is_free(self) -> bool:
        """Whether nobody but graphs holds it, so that nobody will save it again."""
        return self._original is not None and num_holders(self._original.tensor) <= ALONE

    def save(self, saver: Saver, geometry: Geometry) -> Use:
        """A graph that is made now needs a view of it."""
        self.savers.append((saver, geometry))
        return Use(self, saver.kind, geometry)

    def settle(self, pass_on: Callable[[Tensor], Packed]) -> None:
        """Encode it, or pass on what cannot be encoded, and let go of it."""
        original = self._original
        if original is None or version(original.tensor) != original.version:
            return  # the backward pass will say that it was written to
        storage = original.tensor.untyped_storage()
        encoded = encode(storage, self.savers, self._codec)
        if self.is_closed:  # garbage was collected meanwhile, and its graphs in it
            return
        self.encoded, self._original, self.is_settled = encoded, None, True
        if self.encoded is not None:
            self._there = [announce(original.tensor, "compressed", self._here)]
            self._there += [announce(tensor, "kept", self._here) for tensor in self.encoded.tensors]
        else:
            self._passed = {geometry: pass_on(geometry.view(storage)) for _, geometry in self.savers}
            if any(isinstance(packed, Kept) for packed in self._passed.values()):
                return
        self._here()

    def join(self, use: Use) -> None:
        """One more needs it; `leave` as often."""
        self._uses[id(use)] = use.kind

    def leave(self, use: Use) -> None:
        """One less needs it; after the last it is gone."""
        del self._uses[id(use)]
        self._served(use)
        if not self._uses:
            self._here()
            for release in self._there:
                release()
            self._original, self.encoded, self._passed, self.is_closed = None, None, {}, True
            self._closed(self)

    def view(self, use: Use) -> Tensor:
        """What a graph needs of it.

        Raises:
            RuntimeError: If it was written to since it was saved.
        """
        if self._original is not None:
            return use.geometry.view(self._original.unpack().untyped_storage())
        if self.encoded is None:
            return self._passed[use.geometry].unpack()
        decoder = self.encoded.decoders.get(use.kind)
        if decoder is None:
            return _shape_alone(use.geometry, self._device)
        return use.geometry.view(self._flat(decoder, use).untyped_storage())

    def _flat(self, decoder: Decoder, use: Use) -> Tensor:
        """Decode it, once for all who read the same in a backward pass."""
        backward = backward_pass()
        if backward != self._backward:
            self._backward, self._awaited = backward, set(self._uses)
            self._dense.clear()
        flat = self._dense.get(decoder)
        if flat is None:
            flat = decoder()
            announce(flat, "kept", self._here)  # for the module's name; it counts until its memory is free
        self._dense[decoder] = flat
        self._served(use)
        return flat

    def _served(self, use: Use) -> None:
        """Somebody has got what it needs in this backward pass: drop what nobody else waits for."""
        self._awaited.discard(id(use))
        if self.encoded is None or self._backward == NO_PASS:
            self._dense.clear()
            return
        awaited = {self.encoded.decoders.get(self._uses[number]) for number in self._awaited}
        for decoder in [decoder for decoder in self._dense if decoder not in awaited]:
            del self._dense[decoder]


class Use:
    """What a graph holds in place of a tensor."""

    def __init__(self, stored: Compressed, kind: Kind, geometry: Geometry) -> None:
        self._stored, self.kind, self.geometry = stored, kind, geometry
        stored.join(self)

    def unpack(self) -> Tensor:
        """The tensor, as far as its gradient reads it."""
        return self._stored.view(self)

    def __del__(self) -> None:
        self._stored.leave(self)


def _shape_alone(geometry: Geometry, device: torch.device) -> Tensor:
    """Zeros of a shape; one of them in memory, unless the strides matter too."""
    zero = torch.zeros((), dtype=geometry.dtype, device=device)
    contiguous = torch.empty(geometry.size, device="meta").stride()
    if geometry.stride == contiguous:
        return zero.expand(geometry.size)
    return torch.empty_strided(geometry.size, geometry.stride, dtype=geometry.dtype, device=device).zero_()
