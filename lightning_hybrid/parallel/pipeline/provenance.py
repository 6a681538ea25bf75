"""Where a tensor's value comes from: a dispatch mode that follows it through every operation of one step.

`torch.fx` and `torch.export` were considered: they need a model that traces, with no Python control flow and with
shapes that can be made symbolic. Here the step runs as it is, once, and each storage carries a set of sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_hybrid.compat import TorchDispatchMode, storage_key
from lightning_hybrid.functional.trees import leaves_of

LIVE = 1  # computed by a block of this stage, or received as its payload
READS_MEMORY = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__})
"""Methods that read a tensor's memory without any dispatched operation."""


class AbsentValueError(RuntimeError):
    """The step on this stage needs a value that only another stage has."""


class Sources:
    """Names for bits: each module or parameter that values may come from has one.

    Attributes:
        absent: Bits of modules and parameters that live elsewhere; a value with one of them is meaningless here.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._next = LIVE << 1
        self.absent = 0

    def add(self, name: str, *, absent: bool = False) -> int:
        """A new bit."""
        bit, self._next = self._next, self._next << 1
        self._names[bit] = name
        if absent:
            self.absent |= bit
        return bit

    def names(self, tag: int) -> list[str]:
        """Names of the bits in a tag, oldest first."""
        return [name for bit, name in self._names.items() if tag & bit]


class Provenance:
    """Enter it around one run of the step; tags belong to storages, so that views and in-place writes share them.

    Attributes:
        read: Union of the tags of all values that the step has read as Python numbers.
        depth: How many are entered.
    """

    depth: ClassVar[int] = 0

    def __init__(self) -> None:
        self.sources = Sources()
        self.read = 0
        self._tags: dict[int, int] = {}
        self._alive: list[torch.UntypedStorage] = []  # a freed storage's address could be reused with its tag
        self._modes = (_Follow(self), _WatchMemoryReads(self))

    def __enter__(self) -> Provenance:
        for mode in self._modes:
            mode.__enter__()
        Provenance.depth += 1
        return self

    def __exit__(self, *exception: object) -> None:
        Provenance.depth -= 1
        for mode in reversed(self._modes):
            mode.__exit__(*exception)

    def of(self, tensor: Tensor) -> int:
        """The tensor's tag: a union of bits."""
        return self._tags.get(_key(tensor), 0)

    def union(self, tree: object) -> int:
        """The tags of all tensors in a tree."""
        tag = 0
        for tensor in tensors_of(tree):
            tag |= self.of(tensor)
        return tag

    def set(self, tensor: Tensor, tag: int) -> None:
        """Replace a tensor's tag."""
        key = _key(tensor)
        if key not in self._tags:
            self._alive.append(tensor.untyped_storage())
        self._tags[key] = tag

    def add(self, tensors: Iterable[Tensor], tag: int) -> None:
        """Add bits to the tags of tensors."""
        for tensor in tensors:
            self.set(tensor, self.of(tensor) | tag)

    def refuse_absent(self, tag: int, reader: str) -> None:
        """Raise if a value that `reader` needs comes from another stage.

        Raises:
            AbsentValueError: With the names of both.
        """
        absent = tag & self.sources.absent
        if absent:
            names = self.sources.names(absent)
            raise AbsentValueError(
                f"{reader} reads a value of {', '.join(names)}, which {'lives' if len(names) == 1 else 'live'} on an "
                "earlier pipeline stage and is not among the arguments of the block where this stage starts: a skip "
                "connection crosses the cut. Choose a partition that keeps both ends in one stage, or pass the value "
                "through the blocks as an argument."
            )


def tensors_of(tree: object) -> list[Tensor]:
    """The tensors among the leaves of a tree."""
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


def _key(tensor: Tensor) -> int:
    try:
        return storage_key(tensor)
    except NotImplementedError:  # a wrapper without storage, such as a DTensor or an opaque tensor
        return id(tensor)


class _Follow(TorchDispatchMode):
    """Each operation's outputs take the union of its inputs' tags."""

    def __init__(self, provenance: Provenance) -> None:
        super().__init__()
        self._provenance = provenance

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        tag = self._provenance.union((args, kwargs or {}))
        if tag:
            self._refuse_python_values(func, args, tag)
            self._provenance.add(tensors_of(out), tag)
        return out

    def _refuse_python_values(self, func: Any, args: tuple[Any, ...], tag: int) -> None:
        if torch.Tag.data_dependent_output in func.tags:
            _refuse_read(self._provenance, tag)
        if torch.Tag.dynamic_output_shape in func.tags:
            # indexing depends on values only through boolean masks; other such operations always do
            is_index = len(args) > 1 and isinstance(args[1], list | tuple)
            masks = [t for t in tensors_of(args[1]) if t.dtype in (torch.bool, torch.uint8)] if is_index else args
            _refuse_read(self._provenance, self._provenance.union(masks))


class _WatchMemoryReads(TorchFunctionMode):
    """Refuses `tolist`, `numpy` and the like on absent values: they bypass dispatch."""

    def __init__(self, provenance: Provenance) -> None:
        super().__init__()
        self._provenance = provenance

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in READS_MEMORY:
            _refuse_read(self._provenance, self._provenance.of(args[0]))
        return func(*args, **(kwargs or {}))


def _refuse_read(provenance: Provenance, tag: int) -> None:
    provenance.read |= tag
    absent = tag & provenance.sources.absent
    if absent:
        names = ", ".join(provenance.sources.names(absent))
        raise AbsentValueError(
            f"The step reads a Python number (or a shape that depends on values) from the output of {names}, which "
            "lives on another pipeline stage, so that this stage cannot know it. Keep the value a tensor, or move the "
            "decision into a block. If what is read should come from the last block, a skip connection crosses the "
            "cut: choose a partition that keeps both of its ends in one stage."
        )
