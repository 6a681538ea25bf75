"""Which storages are those of parameters and buffers, also where `fully_shard` gathers them into modules on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_hybrid.compat import storage_key
from lightning_hybrid.parallel.gradients import local
from lightning_hybrid.parallel.ledgers.running import RunningModules


class FixedStorages:
    """Tells a module's parameters and buffers from activations. Call `start` before each step.

    Args:
        root: The module.
        met: Told of each parameter or buffer, and the module that has it: at the start of each step, and of new ones.

    Attributes:
        running: The modules under way.
    """

    def __init__(self, root: nn.Module, met: Callable[[nn.Module, Tensor], None] | None = None) -> None:
        self._root, self._met = root, met
        self.running = RunningModules(root)
        self._keys: dict[int, StorageWeakRef] = {}  # which keep a storage's identity from being used again
        self._seen = WeakTensorKeyDictionary()
        self._may_change, self._scanned = True, list[nn.Module]()

    def start(self) -> None:
        """Look at the whole module, which others may have changed since."""
        # a strategy may shard in the first step
        self._may_change = not self._seen or any(isinstance(p, DTensor) for p in self._root.parameters())
        self._keys = {key: storage for key, storage in self._keys.items() if not storage.expired()}
        self.running.update()
        self._scan(self._root.modules(), again=True)

    def is_fixed(self, tensor: Tensor) -> bool:
        """Whether a tensor, of a DTensor the local part, lies in the storage of a parameter or buffer."""
        key = storage_key(local_part(tensor))
        if self._may_change and key not in self._keys:
            running = self.running.now()
            if running[:1] != self._scanned:
                self._scanned = running[:1]
                if self._scan(running) or not running:
                    self._scan(self._root.modules())
        return key in self._keys

    def _scan(self, modules: Iterable[nn.Module], *, again: bool = False) -> bool:
        """Learn the parameters and buffers that modules have now; returns whether there were new ones."""
        found = False
        for module in modules:
            for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                if again or tensor not in self._seen:
                    found = True
                    self._learn(module, tensor)
        return found

    def _learn(self, module: nn.Module, tensor: Tensor) -> None:
        part = local_part(tensor)
        self._keys.setdefault(storage_key(part), StorageWeakRef(part.untyped_storage()))
        self._seen[tensor] = None
        if self._met is not None:
            self._met(module, tensor)


def local_part(tensor: Tensor) -> Tensor:
    """A tensor, or of a DTensor the part that is here, outside of any graph."""
    with torch.no_grad():
        return local(tensor)
