"""Saved activations in fewer bytes between forward and backward (Gist, Jain et al. 2018, ISCA).

Autograd hands over what it saves, and who saves it is found on the stack. A storage stays whole until the forward pass
has let go of it; then all its savers are known, and it is encoded for what they read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_hybrid.compat import in_backward, storage_key, version
from lightning_hybrid.functional.compressing import RAW, LayerBytes
from lightning_hybrid.parallel.ledgers.fixed import FixedStorages
from lightning_hybrid.parallel.memory import passes
from lightning_hybrid.parallel.memory.casts import is_cast
from lightning_hybrid.parallel.memory.compressed import Compressed
from lightning_hybrid.parallel.memory.encoding import BYTES, FLOATS, Codec, may_be_sparse
from lightning_hybrid.parallel.memory.hooks import ChainedHooks, Packed
from lightning_hybrid.parallel.memory.offload_copies import Geometry
from lightning_hybrid.parallel.memory.savers import Saver, saver_of
from lightning_hybrid.parallel.memory.storages import is_plain, unnumbered

LOOKS = 64
"""Storages that are looked at when one more is saved: users may hold any number whole, such as all states of a loop."""


class Compression:
    """Compresses what is saved within `start` and `stop`.

    A storage is encoded once, whoever saves it in whatever views. Parameters and buffers stay, and so do tensors of
    other devices, sparse ones and those of subclasses. What is not taken is left to hooks outside.

    Args:
        root: The module that is trained.
        device: Where it runs.
        codec: What may be done.
        min_bytes: Smaller storages stay.

    Attributes:
        chooses: Asked about each tensor that could be compressed.
        settled: Told of each storage when it is encoded, or found not to get smaller.
        codec: As given.
        layers: Of the last step that has ended, by module in the order in which they save.
    """

    def __init__(self, root: nn.Module, device: torch.device, codec: Codec, min_bytes: int) -> None:
        self.chooses: Callable[[Tensor], bool] = lambda tensor: True
        self.settled: Callable[[Compressed], object] = lambda stored: None
        self.layers: dict[str, LayerBytes] = {}
        self._device, self.codec, self._min_bytes = unnumbered(device), codec, min_bytes
        self._root, self._fixed, self._hooks = root, FixedStorages(root), ChainedHooks(self._pack)
        self._table: dict[tuple[int, int], list[Compressed]] = {}
        self._waiting: list[Compressed] = []
        self._left: dict[tuple[int, int], StorageWeakRef] = {}
        self._before, self._after = Counter[str](), Counter[tuple[str, str]]()
        self._active, self._is_probe = False, False

    def start(self) -> None:
        """A batch begins."""
        self._fixed.start()
        self._is_probe = False
        self._before, self._after = Counter(), Counter()
        self._left.clear()
        passes.observers.append(self._begin_pass)
        self._hooks.__enter__()
        self._active = True

    def stop(self) -> None:
        """The batch is over; graphs that are left can still run backward."""
        if self._active:
            self._active = False
            self._hooks.__exit__()
            passes.observers.remove(self._begin_pass)
            self._settle()
            self._note_layers()

    def close(self) -> None:
        """Compress no more."""
        self.stop()

    def _begin_pass(self, trained: bool) -> None:
        self._settle()
        self._is_probe = not trained

    def _pack(self, tensor: Tensor) -> Packed | None:
        if self._is_probe or in_backward() or not is_plain(tensor, self._device) or self._fixed.is_fixed(tensor):
            return None
        self._settle(LOOKS)
        saver, stored = self.saver(tensor), self._find(tensor)
        module = self._name(saver)
        if stored is None and self._is_left(tensor):
            return None  # another holds it whole
        if stored is None and self.is_worthwhile(tensor, saver) and self.chooses(tensor):
            stored = self._take(tensor, module)
        if stored is not None:
            return stored.save(saver, Geometry.of(tensor))
        self._left[storage_key(tensor), version(tensor)] = StorageWeakRef(tensor.untyped_storage())
        self._count(module, RAW, tensor.untyped_storage().nbytes())
        return None

    def _is_left(self, tensor: Tensor) -> bool:
        left = self._left.get((storage_key(tensor), version(tensor)))
        return left is not None and not left.expired()

    def saver(self, tensor: Tensor) -> Saver:
        """Who saves a tensor now, and what its gradient reads."""
        saver = saver_of(tensor)
        if saver.kind == "other" and (not self._name(saver) or self._is_cast(tensor, saver)):
            return saver._replace(kind="exact")  # the step's own code runs within modules of some strategies
        return saver

    def _name(self, saver: Saver) -> str:
        return self._fixed.running.names.get(id(saver.module), "")

    def is_worthwhile(self, tensor: Tensor, saver: Saver) -> bool:
        """Whether it could become smaller, from what is known when the first of its savers saves it."""
        codec, kind = self.codec, saver.kind
        if tensor.untyped_storage().nbytes() < self._min_bytes:
            return False
        if tensor.dtype not in FLOATS:
            return codec.lossless and (tensor.dtype is torch.bool or kind == "argmax")
        if kind in ("relu", "pool") and codec.lossless:
            return True
        if codec.lossy is not None and kind != "exact" and BYTES[codec.lossy] < tensor.element_size():
            return True
        return codec.lossless and may_be_sparse(tensor)

    def _is_cast(self, tensor: Tensor, saver: Saver) -> bool:
        """Whether it is a parameter in another type: an error in it would go through all layers before."""
        may_be_rounded = self.codec.lossy is not None and tensor.dtype in FLOATS
        return may_be_rounded and saver.module is not None and is_cast(tensor, saver.module)

    def _take(self, tensor: Tensor, module: str) -> Compressed:
        key = storage_key(tensor), version(tensor)
        stored = Compressed(tensor, module, self.codec, partial(self._forget, key))
        self._table.setdefault(key, []).append(stored)
        self._waiting.append(stored)
        self._before[module] += 0  # keeps its place in the order
        return stored

    def _find(self, tensor: Tensor) -> Compressed | None:
        """That of its storage as it is now, of those that would notice writes to the tensor."""
        same = self._table.get((storage_key(tensor), version(tensor)), [])
        return next((stored for stored in same if stored.counts_with(tensor)), None)

    def _forget(self, key: tuple[int, int], stored: Compressed) -> None:
        if not stored.is_settled:  # its backward pass came at once
            self._count(stored.module, RAW, stored.num_bytes)
        self._table[key].remove(stored)
        if not self._table[key]:
            del self._table[key]

    def _settle(self, most: int | None = None) -> None:
        """Encode what only graphs hold, of all or of the last that wait; then others are the last."""
        first = 0 if most is None else max(0, len(self._waiting) - most)
        others, waiting, self._waiting = self._waiting[:first], self._waiting[first:], []
        for stored in waiting:
            if stored.is_free:
                stored.settle(self._hooks.pass_on)
                if stored.is_closed:
                    continue
                encoded = stored.encoded
                code, after = (RAW, None) if encoded is None else (encoded.code, encoded.num_bytes)
                self._count(stored.module, code, stored.num_bytes, after)
                self.settled(stored)
            elif not stored.is_closed:
                self._waiting.append(stored)
        self._waiting += others

    def _count(self, module: str, code: str, before: int, after: int | None = None) -> None:
        self._before[module] += before
        self._after[module, code] += before if after is None else after

    def _note_layers(self) -> None:
        after: dict[str, dict[str, int]] = {module: {} for module in self._before}
        for (module, code), num_bytes in self._after.items():
            after[module][code] = num_bytes
        self.layers = {module: LayerBytes(before, after[module]) for module, before in self._before.items()}
