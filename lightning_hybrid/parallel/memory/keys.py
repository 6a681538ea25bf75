"""Names for saved storages that are the same from step to step, whether or not blocks are recomputed.

A plan that is made from what two steps have shown must find each storage again in later steps, where other blocks save
something that hooks see. So storages are numbered within the block that saves them, or within the code between blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_hybrid.compat import in_backward, storage_key
from lightning_hybrid.functional.trees import leaves_of
from lightning_hybrid.parallel.ledgers.fixed import FixedStorages, local_part
from lightning_hybrid.parallel.memory import passes
from lightning_hybrid.parallel.memory.calls import Order, surround
from lightning_hybrid.parallel.memory.hooks import ChainedHooks, Packed, PassedOn
from lightning_hybrid.parallel.memory.inputs import place_of
from lightning_hybrid.parallel.memory.storages import is_plain, unnumbered
from lightning_hybrid.parallel.tensor.split_tensor import part_of

BEFORE = "(before blocks)"


class Key(NamedTuple):
    """Where a pass meets a storage.

    Attributes:
        group: The block that runs, "(after NAME)" for the code behind it, or `BEFORE`.
        number: Of the storages that the group saves, in the order of their first time; or of the block's arguments.
        is_argument: Which of the two.
    """

    group: str
    number: int
    is_argument: bool


@dataclass
class Met:
    """A storage that a pass has met.

    Attributes:
        num_bytes: Its bytes.
        keys: One for each group that saves it and each block that gets it, in the order in which it was met.
        handed_on: Blocks that get it as it was given by the block just before.
    """

    num_bytes: int
    keys: list[Key] = field(default_factory=list)
    handed_on: set[str] = field(default_factory=set)
    _identity: StorageWeakRef | None = None  # no other storage gets it meanwhile

    def add(self, key: Key) -> bool:
        """Note a key, if there is none of its group; returns whether there was none."""
        is_new = all(known.group != key.group for known in self.keys)
        if is_new:
            self.keys.append(key)
        return is_new


class KeyObserver(Protocol):
    """Who measures."""

    def saved(self, tensor: Tensor, met: Met) -> None:
        """A tensor is saved, or kept for a repetition, by what no other hooks inside take."""

    def pass_ended(self, met: list[Met], called: list[str], *, goes_on: bool) -> None:
        """A pass has met these storages, and called these blocks, in order; or it goes on and calls them again."""


class _Token:
    """What is held of a group in one pass holds this."""

    def __init__(self, alive: Counter[str], group: str) -> None:
        self._alive, self._group = alive, group
        alive[group] += 1

    def __del__(self) -> None:
        self._alive[self._group] -= 1


class _Counted(PassedOn):
    """What hooks outside have made of a tensor, while passes are counted."""

    def __init__(self, packed: Packed, token: _Token) -> None:
        super().__init__(packed, _unpack)
        self._token = token


def _unpack(packed: Packed) -> Tensor:
    return packed.unpack()


def after(name: str) -> str:
    """The group of the code behind a block."""
    return f"(after {name})"


class SavedKeys:
    """Numbers what forward passes save within `start` and `stop`, by hooks that leave it to those outside.

    Parameters and buffers have no keys, nor have sparse tensors and those on other devices. Of a DTensor or a split
    tensor, which stay as they are, the part that is here has. A block that is called again begins another pass here, so
    that all its calls are alike.

    Args:
        root: The module that is trained.
        blocks: Modules in it by name.
        device: Where it runs.

    Attributes:
        group: What runs; see `Key`.
        observer: Who measures, if anybody does.
        num_passes: Passes that have met anything.
        in_flight: While somebody measures, most passes at once of which something of one group was held.
    """

    def __init__(self, root: nn.Module, blocks: Mapping[str, nn.Module], device: torch.device) -> None:
        self.observer: KeyObserver | None = None
        self.group, self.num_passes, self.in_flight = BEFORE, 0, 1
        self._fixed, self._device, self._hooks = FixedStorages(root), unnumbered(device), ChainedHooks(self._pack)
        self._active = self._is_probe = False
        self._met: dict[int, Met] = {}
        self._numbers, self._called = Counter[str](), dict[str, None]()
        self._results = set[Any]()  # of the block before, as `place_of` tells them apart
        self._alive, self._tokens = Counter[str](), dict[str, _Token]()
        self._removes = [surround(block, Order.NUMBER, partial(self._around, name)) for name, block in blocks.items()]

    def start(self) -> None:
        """A batch begins; hooks that are entered before this are outside."""
        self._fixed.start()
        self._begin_pass(trained=True)
        passes.observers.append(self._begin_pass)
        self._hooks.__enter__()
        self._active = True

    def stop(self) -> None:
        """The batch is over."""
        if self._active:
            self._active = False
            self._hooks.__exit__()
            passes.observers.remove(self._begin_pass)
            self._begin_pass(trained=True)

    def close(self) -> None:
        """Leave the modules as they were."""
        self.stop()
        for remove in self._removes:
            remove()
        self._removes.clear()

    def saved(self, tensor: Tensor) -> Met | None:
        """What is known of the storage of a tensor that is being saved; None if it has no keys.

        Hooks inside that take a tensor must ask, in the order in which autograd saves; once more changes nothing.
        """
        if not self._active or self._is_probe or in_backward():
            return None
        part = part_of(local_part(tensor))
        if not self._counts(part):
            return None
        met = self._meet(part)
        self._numbers[self.group] += met.add(Key(self.group, self._numbers[self.group], is_argument=False))
        return met

    def find(self, tensor: Tensor) -> Met | None:
        """What the pass knows of the storage of a tensor."""
        return self._met.get(storage_key(tensor))

    def _pack(self, tensor: Tensor) -> Packed | None:
        met = self.saved(tensor)
        if self.observer is None or met is None:
            return None
        self.observer.saved(tensor, met)
        if self.group not in self._tokens:
            self._tokens[self.group] = _Token(self._alive, self.group)
        return _Counted(self._hooks.pass_on(tensor), self._tokens[self.group])

    def _begin_pass(self, trained: bool, *, goes_on: bool = False) -> None:
        if self._met:
            self.num_passes += 1
            if self.observer is not None:
                self.observer.pass_ended(list(self._met.values()), list(self._called), goes_on=goes_on)
        self._is_probe = not trained
        self._enter(BEFORE)
        for of_pass in (self._met, self._numbers, self._called, self._results, self._tokens):
            of_pass.clear()

    def _enter(self, group: str) -> None:
        """Another group runs. What the last one has replaced of an earlier pass has gone by now."""
        self.in_flight = max(self.in_flight, self._alive[self.group])
        self.group = group

    def _around(self, name: str, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called in a block's place."""
        if not self._active or self._is_probe or in_backward() or not torch.is_grad_enabled():
            return proceed(*args, **kwargs)
        if name in self._called:
            self._begin_pass(trained=True, goes_on=True)
        self._called[name] = None
        self._enter(name)
        for number, tensor in enumerate(self._tensors(args, kwargs)):
            met = self._meet(tensor)
            met.add(Key(name, number, is_argument=True))
            if place_of(tensor) in self._results:
                met.handed_on.add(name)
        try:
            result = proceed(*args, **kwargs)
        finally:
            self._enter(after(name))
        self._results.clear()
        for tensor in self._tensors(result):
            self._meet(tensor)
            self._results.add(place_of(tensor))
        return result

    def _tensors(self, *trees: Any) -> list[Tensor]:
        parts = [part_of(local_part(leaf)) for leaf in leaves_of(trees) if isinstance(leaf, Tensor)]
        return [part for part in parts if self._counts(part)]

    def _counts(self, tensor: Tensor) -> bool:
        return is_plain(tensor, self._device) and not self._fixed.is_fixed(tensor)

    def _meet(self, tensor: Tensor) -> Met:
        storage = tensor.untyped_storage()
        return self._met.setdefault(storage_key(tensor), Met(storage.nbytes(), _identity=StorageWeakRef(storage)))
