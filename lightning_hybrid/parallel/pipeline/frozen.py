"""Deep copies of plain Python state that can be compared with it later, and put back into the same objects."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor

CONTAINERS = (list, dict, set, deque)
SIMPLE = (bool, int, float, complex, str, bytes, type(None))


class Frozen:
    """The state of a value: of containers, dataclasses, tensors, arrays and generators of random numbers at any depth.

    Anything else is kept by reference. What `differs` compares is containers and tensors alone.

    Args:
        value: A container, a tensor or anything.
        seen: Containers on the way down, so that one that holds itself ends.
    """

    def __init__(self, value: Any, seen: frozenset[int] = frozenset()) -> None:
        self.value = value
        self._items: list[tuple[Any, Frozen]] | None = None
        self._tensor: Tensor | None = None
        self._fields: Frozen | None = None
        self._put_back: Callable[[], object] | None = None
        if isinstance(value, CONTAINERS) and id(value) not in seen:
            self._items = [(key, Frozen(item, seen | {id(value)})) for key, item in _items(value)]
        elif isinstance(value, Tensor) and _is_plain(value):
            self._tensor = value.detach().clone()
        elif _has_fields(value):
            self._fields = Frozen(vars(value), seen)
        else:
            self._put_back = _keep(value)

    def thaw(self) -> Any:
        """The same object with its old state."""
        if self._items is not None:
            items = [(key, item.thaw()) for key, item in self._items]
            if [(key, id(item)) for key, item in _items(self.value)] != [(key, id(item)) for key, item in items]:
                _refill(self.value, items)
        elif self._tensor is not None and not _same(self.value, self._tensor):
            if self.value.is_inference() and not torch.is_inference_mode_enabled():
                return self._tensor  # it cannot be written any more
            with torch.no_grad():
                self.value.copy_(self._tensor)
        elif self._fields is not None:
            self._fields.thaw()
        elif self._put_back is not None:
            self._put_back()
        return self.value

    def differs(self, value: Any) -> bool:
        """Whether `value`, possibly the same object, has another state than the frozen one had."""
        if self._items is not None and isinstance(value, CONTAINERS):
            return type(value) is not type(self.value) or self._items_differ(list(_items(value)))
        if self._tensor is not None and isinstance(value, Tensor):
            return not _same(value, self._tensor)
        if isinstance(value, SIMPLE) and isinstance(self.value, SIMPLE):
            return type(value) is not type(self.value) or not (value == self.value or value != value)
        return value is not self.value

    def _items_differ(self, items: list[tuple[Any, Any]]) -> bool:
        assert self._items is not None
        if len(items) != len(self._items):
            return True
        pairs = zip(items, self._items, strict=True)
        return any(key != old_key or old.differs(item) for (key, item), (old_key, old) in pairs)


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(container, dict):
        return container.items()
    return ((item, item) for item in container) if isinstance(container, set) else enumerate(container)


def _refill(container: Any, items: list[tuple[Any, Any]]) -> None:
    container.clear()
    if isinstance(container, dict):
        container.update(dict(items))
    elif isinstance(container, set):
        container.update(item for _, item in items)
    else:
        container.extend(item for _, item in items)


def _has_fields(value: Any) -> bool:
    """Whether its attributes are all that it is."""
    records = isinstance(value, SimpleNamespace) or (is_dataclass(value) and not isinstance(value, type))
    return records and hasattr(value, "__dict__")


def _keep(value: Any) -> Callable[[], object] | None:
    """What gives a generator of random numbers, or an array, its state of now again; None for anything else."""
    state: Any
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, random.Random):
        state = value.getstate()
        return lambda: value.setstate(state)
    if isinstance(value, numpy.random.RandomState):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, numpy.random.Generator):
        bits, state = value.bit_generator, value.bit_generator.state
        return lambda: setattr(bits, "state", state)
    if type(value) is numpy.ndarray and value.flags.writeable:  # others may be files
        state = value.copy()
        return lambda: numpy.copyto(value, state)
    return None


def _is_plain(tensor: Tensor) -> bool:
    """Whether its values can be copied and compared; an expanded tensor is a stand-in that nobody writes."""
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta) and 0 not in tensor.stride()


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal, with NaN equal to NaN."""
    a, b = a.detach(), b.detach()
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
