"""Saved activations that wait for their backward pass in host memory (vDNN, Rhu et al. 2016, arXiv:1602.08124).

Autograd hands over what it saves; copies to host memory begin at once, and what a block saved leaves the device when
the next block is done. The backward pass brings blocks back, one ahead of the one that it is in. So the device holds
what two blocks have saved, and what the code between them has, whatever the number of blocks.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_hybrid.compat import in_backward, storage_key, version
from lightning_hybrid.parallel.ledgers.fixed import FixedStorages
from lightning_hybrid.parallel.ledgers.running import MODULE_CALL, variable
from lightning_hybrid.parallel.memory import passes
from lightning_hybrid.parallel.memory.calls import Order, surround
from lightning_hybrid.parallel.memory.hooks import ChainedHooks, Packed
from lightning_hybrid.parallel.memory.offload_copies import Copies, Geometry
from lightning_hybrid.parallel.memory.offload_groups import Group
from lightning_hybrid.parallel.memory.offload_stored import Stored
from lightning_hybrid.parallel.memory.storages import is_plain, unnumbered

Policy = Literal["all", "blocks", "conv"]
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class Offload:
    """Offloads what is saved within `start` and `stop`.

    A storage is copied once, whoever saves it in whatever views. Parameters and buffers stay, and so do tensors of
    other devices, sparse ones and those of subclasses.

    Args:
        root: The module that is trained.
        blocks: Modules in it by name: what is saved in a call of one moves together.
        device: Where it runs.
        policy: What goes: everything, what blocks save, or what convolutions save, and other operations too then.
        min_bytes: Smaller storages stay.

    Attributes:
        plan: Names of groups that stay if False; those that are not in it go.
        chooses: Asked whether each saved tensor is to go that can; None for all.
        sizes: Bytes that went, by group, of one pass at most; in the order in which groups run. What two groups save
            counts for both.
        in_flight: Most passes at once that held something of one group.
        copies: How storages move.
    """

    def __init__(
        self, root: nn.Module, blocks: Mapping[str, nn.Module], device: torch.device, policy: Policy, min_bytes: int
    ) -> None:
        self.plan: dict[str, bool] = {}
        self.chooses: Callable[[Tensor], bool] | None = None
        self.sizes: dict[str, int] = {}
        device = unnumbered(device)
        self.in_flight, self.copies = 0, Copies(device)
        self._device, self._policy, self._min_bytes = device, policy, max(1, min_bytes)
        self._fixed, self._hooks = FixedStorages(root), ChainedHooks(self._pack)
        self._table: dict[tuple[int, int], list[Stored]] = {}
        self._leaving: list[tuple[int, Stored]] = []
        self._alive = Counter[str]()
        self._active, self._number = False, 0
        self._begin_pass(trained=True)
        self._removes = [surround(block, Order.WATCH, partial(self._around, name)) for name, block in blocks.items()]

    def start(self) -> None:
        """A batch begins."""
        self._fixed.start()
        self._begin_pass(trained=True)
        passes.observers.append(self._begin_pass)
        self._hooks.__enter__()
        self._active = True

    def stop(self) -> None:
        """The batch is over; graphs that are left can still run backward."""
        if self._active:
            self._active = False
            self._hooks.__exit__()
            passes.observers.remove(self._begin_pass)
            self._settle(self._number + 1)
            self.copies.pool.trim()

    def close(self) -> None:
        """Leave the modules as they were."""
        self.stop()
        for remove in self._removes:
            remove()
        self._removes.clear()

    def can_move(self, tensor: Tensor) -> bool:
        """Whether a tensor would move that an operation is saving now."""
        return self._may_move(tensor) and self._is_wanted(self._group)

    def _begin_pass(self, trained: bool) -> None:
        self._settle(self._number + 1)
        self._is_probe = not trained
        self._group = self._new_group("(before blocks)", None, is_block=False)

    def _new_group(self, name: str, before: Group | None, *, is_block: bool) -> Group:
        self._number += 1
        return Group(name, is_block, self._number, before, self._entering, self._emptied)

    def _begin_group(self, name: str, *, is_block: bool) -> Group:
        # a plan counts on the unit just before to come back, and on none behind it that saved nothing
        before = self._group if self._group or self.chooses is not None else self._group.before
        self._group = self._new_group(name, before, is_block=is_block)
        return self._group

    def _around(self, name: str, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called in a block's place."""
        if not self._active or in_backward():
            return proceed(*args, **kwargs)
        group = self._begin_group(name, is_block=True)
        try:
            return proceed(*args, **kwargs)
        finally:
            self._settle(group.number)
            self._begin_group(f"(after {name})", is_block=False)

    def _pack(self, tensor: Tensor) -> Packed | None:
        if self._is_probe or in_backward():
            return None
        chosen = self.chooses is None or self.chooses(tensor)
        if not chosen or not self._may_move(tensor):
            return None
        group, stored = self._group, self._stored(tensor)
        if not stored.moves and self._is_wanted(group):
            stored.move()
            self._leaving.append((group.number, stored))
        if not group:
            self._alive[group.name] += 1
            self.in_flight = max(self.in_flight, self._alive[group.name])
        saved = group.save(stored, Geometry.of(tensor))
        if stored.moves:
            self.sizes[group.name] = max(self.sizes.get(group.name, 0), group.num_bytes)
        return saved

    def _stored(self, tensor: Tensor) -> Stored:
        """That of its storage as it is now, of those that would notice writes to the tensor."""
        key = storage_key(tensor), version(tensor)
        same = self._table.setdefault(key, [])
        for stored in same:
            if stored.counts_with(tensor):
                return stored
        stored = Stored(tensor, self.copies, partial(self._forget, key))
        same.append(stored)
        return stored

    def _forget(self, key: tuple[int, int], stored: Stored) -> None:
        self._table[key].remove(stored)
        if not self._table[key]:
            del self._table[key]

    def _may_move(self, tensor: Tensor) -> bool:
        if not is_plain(tensor, self._device) or self._fixed.is_fixed(tensor):
            return False
        return tensor.untyped_storage().nbytes() >= self._min_bytes

    def _is_wanted(self, group: Group) -> bool:
        if not self.plan.get(group.name, True):
            return False
        return self._policy == "all" or (group.is_block if self._policy == "blocks" else _in_convolution())

    def _settle(self, before: int) -> None:
        """Wait for the copies of groups before one."""
        for number, stored in self._leaving:
            if number < before:
                stored.settle()
        self._leaving = [(number, stored) for number, stored in self._leaving if number >= before]

    def _entering(self) -> None:
        """A backward pass needs room for what it brings: of what leaves, only what it holds stays."""
        self._settle(self._number + 1)

    def _emptied(self, group: Group) -> None:
        self._alive[group.name] -= 1


def _in_convolution() -> bool:
    """Whether the innermost module that runs is a convolution."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not MODULE_CALL:
        frame = frame.f_back
    return frame is not None and isinstance(variable(frame, "self"), CONVOLUTIONS)
