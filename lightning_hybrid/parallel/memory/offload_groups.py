"""Saved tensors in groups that leave and come back together, one block ahead of the backward pass."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_hybrid.compat import backward_pass
from lightning_hybrid.parallel.memory.offload_copies import Geometry
from lightning_hybrid.parallel.memory.offload_stored import Stored

NO_PASS = -1


class Group:
    """What is saved in one forward pass while a block runs, or between blocks.

    Args:
        name: Of the block, or what stands for the code that follows it.
        is_block: Which of the two.
        number: Groups count up.
        before: The group before it, of the same pass.
        entering: Called when a backward pass holds what it needs of what is here, before it brings the rest.
        emptied: Called when no graph holds any of it.

    Attributes:
        before: As given.
        num_bytes: Of the storages that it saved and that move, of which the group before may have saved some too.
        held_for: The backward pass that has held all of it last.
    """

    def __init__(
        self,
        name: str,
        is_block: bool,
        number: int,
        before: Group | None,
        entering: Callable[[], None],
        emptied: Callable[[Group], None],
    ) -> None:
        self.name, self.is_block, self.number, self.num_bytes = name, is_block, number, 0
        self.before, self._entering, self._emptied = before, entering, emptied
        self._uses: dict[int, Use] = {}
        self.held_for = self._entered = NO_PASS

    def __bool__(self) -> bool:
        return bool(self._uses)

    def save(self, stored: Stored, geometry: Geometry) -> Saved:
        """A graph that is made now needs a view of a storage."""
        use = self._uses.get(id(stored))
        if use is None:
            use = self._uses[id(stored)] = Use(self, stored)
            self.num_bytes += stored.num_bytes if stored.moves else 0
        return Saved(use, geometry)

    def enter(self, backward: int) -> None:
        """A backward pass needs something of it: fetch it, and what was saved before it up to the block before."""
        if self._entered == backward:
            return
        self._entered = backward
        groups: list[Group] = [self]
        most = 3 if self.is_block else 2  # code between two blocks, and a block; either may have saved nothing
        while groups[-1].before is not None and len(groups) < most and not (len(groups) > 1 and groups[-1].is_block):
            groups.append(groups[-1].before)
        for group in groups:
            group._hold(backward)
        self._entering()
        for group in groups:
            for use in list(group._uses.values()):
                use.stored.bring()

    def forget(self, stored: Stored) -> None:
        """No graph needs a storage through this group any more."""
        del self._uses[id(stored)]
        stored.leave()
        if not self._uses:
            self._emptied(self)

    def _hold(self, backward: int) -> None:
        if self.held_for != backward:
            self.held_for = backward
            for use in list(self._uses.values()):  # a graph may be freed meanwhile
                use.hold()


class Use:
    """A group's share in a storage, which others may have saved too.

    Args:
        group: The group.
        stored: The storage, which its groups bring.
    """

    def __init__(self, group: Group, stored: Stored) -> None:
        self._group, self.stored = group, stored
        self._alive = self._awaited = 0
        self._holds = False
        stored.join()

    def hold(self) -> None:
        """Need it on the device until all that is saved of it has been unpacked, or freed."""
        self._awaited = self._alive
        if not self._holds:
            self._holds = True
            self.stored.hold()

    def add(self) -> None:
        """One more view is saved."""
        self._alive += 1

    def remove(self, unpacked_by: int) -> None:
        """A graph has let go of a view, which a backward pass had unpacked last."""
        self._alive -= 1
        if unpacked_by != self._group.held_for:
            self._one_less()
        if not self._alive:
            self._let_go()
            self._group.forget(self.stored)

    def take(self, geometry: Geometry, unpacked_by: int, backward: int) -> Tensor:
        """A view for a backward pass, or for somebody who looks at a graph outside of any."""
        if backward != NO_PASS:
            self._group.enter(backward)
        self.stored.hold()
        try:
            self.stored.bring()
            tensor = self.stored.view(geometry)
        finally:
            if backward != NO_PASS and unpacked_by != backward:
                self._one_less()
            self.stored.release()
        return tensor

    def _one_less(self) -> None:
        self._awaited -= 1
        if not self._awaited:
            self._let_go()

    def _let_go(self) -> None:
        if self._holds:
            self._holds = False
            self.stored.release()


class Saved:
    """What a graph holds in place of a tensor."""

    def __init__(self, use: Use, geometry: Geometry) -> None:
        self._use, self._geometry, self._unpacked_by = use, geometry, NO_PASS
        use.add()

    def unpack(self) -> Tensor:
        """The tensor, in memory that is given up when its group needs it no more."""
        backward = backward_pass()
        try:
            return self._use.take(self._geometry, self._unpacked_by, backward)
        finally:
            self._unpacked_by = backward

    def __del__(self) -> None:
        self._use.remove(self._unpacked_by)
