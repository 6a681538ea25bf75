"""What a module's forward finds and changes beside its arguments, so that it can run again as if for the first time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from lightning_hybrid.compat import buffer_names, version

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers that batch and instance norms write to past autograd's version counters; no result depends on them."""


Generator = torch.Generator | random.Random | numpy.random.Generator


def own_generators(module: nn.Module) -> list[Generator]:
    """Generators that are attributes of a module or of those inside."""
    values = [value for child in module.modules() for value in vars(child).values()]
    return [value for value in values if isinstance(value, Generator)]


class Streams:
    """Random states of this process, as far as something has drawn from them since.

    Args:
        device: Its generator counts beside the CPU's, Python's and NumPy's.
        generators: Others that count.
    """

    def __init__(self, device: torch.device, generators: Sequence[Generator] = ()) -> None:
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._device, self._generators = device, generators
        self._states: dict[str | int, Any] = self._now()

    def finish(self) -> None:
        """Forget the states of streams that are still the same: nothing was drawn."""
        for name, state in self._now().items():
            before = self._states[name]
            if _equal(before, state):
                del self._states[name]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context that draws the same numbers, after which streams go on as if nothing had been drawn."""
        now = {name: state for name, state in self._now().items() if name in self._states}
        self._set(self._states)
        try:
            yield
        finally:
            self._set(now)

    def _now(self) -> dict[str | int, Any]:
        states: dict[str | int, Any] = dict(enumerate(map(_state, self._generators)))
        states |= {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy.random.get_state()}
        if self._module is not None:
            states["device"] = self._module.get_rng_state(self._device)
        return states

    def _set(self, states: dict[str | int, Any]) -> None:
        for name, state in states.items():
            if isinstance(name, int):
                _set_state(self._generators[name], state)
            elif name == "torch":
                torch.set_rng_state(state)
            elif name == "python":
                random.setstate(state)
            elif name == "numpy":
                numpy.random.set_state(state)
            elif self._module is not None:
                self._module.set_rng_state(state, self._device)


def _state(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state


def _set_state(generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):  # of NumPy's generators, some with arrays
        return all(_equal(value, b[name]) for name, value in a.items())
    if isinstance(a, numpy.ndarray):
        return bool(numpy.array_equal(a, b))
    if isinstance(a, tuple) and len(a) == 5:  # NumPy's own stream
        return bool(numpy.array_equal(a[1], b[1])) and a[2:] == b[2:]
    return bool(a == b)


class Autocast:
    """How autocast stands, for the CPU and for a device, and the type of new tensors, which "bf16-true" sets."""

    def __init__(self, device: torch.device) -> None:
        self._cache, self._dtype = torch.is_autocast_cache_enabled(), torch.get_default_dtype()
        self._states = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in {"cpu", device.type}
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context in which they stand like that."""
        with ExitStack() as stack:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
            for kind, enabled, dtype in self._states:
                stack.enter_context(torch.autocast(kind, dtype, enabled, self._cache))
            yield


PLAIN = (int, float, complex, str, bytes, type(None))
ABSENT = object()


class AttributeGuard:
    """Attributes of a module and of those inside: a repetition finds them as the first run did, and changes none.

    That holds for plain values, such as modes and counters, and for whatever the first run binds anew; and for all of
    objects among the arguments, which other modules may change later.

    Args:
        modules: `vars` of the modules.
        arguments: `vars` of the arguments.
    """

    def __init__(self, modules: Sequence[dict[str, Any]], arguments: Sequence[dict[str, Any]]) -> None:
        self._number, self._spaces = len(modules), [*modules, *arguments]

    def before(self) -> list[dict[str, Any]]:
        """What a run finds."""
        return [dict(space) for space in self._spaces]

    def after(self, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What a repetition must find; tensors without their graphs."""
        old = []
        for number, (space, names) in enumerate(zip(self._spaces, found, strict=True)):
            kept = {
                name: value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
                for name, value in names.items()
                if number >= self._number or isinstance(value, PLAIN) or space.get(name, ABSENT) is not value
            }
            old.append(kept | dict.fromkeys(space.keys() - names.keys(), ABSENT))
        return old

    @contextmanager
    def again(self, old: list[dict[str, Any]]) -> Iterator[None]:
        """Context in which they are as they were."""
        now = self.before()
        for space, names in zip(self._spaces, old, strict=True):
            _bind(space, names)
        try:
            yield
        finally:
            for space, names in zip(self._spaces, now, strict=True):
                _bind(space, names | dict.fromkeys(space.keys() - names.keys(), ABSENT))


def _bind(space: dict[str, Any], names: dict[str, Any]) -> None:
    for name, value in names.items():
        if value is ABSENT:
            space.pop(name, None)
        elif space.get(name, ABSENT) is not value:
            space[name] = value


Buffer = tuple[nn.Module, str]


class BufferGuard:
    """Buffers of a module that its forward changes: a repetition finds what the first run found, and changes nothing.

    Which ones they are is seen in the first run, which therefore copies all of them; norms' statistics are known.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._buffers = [(child, name) for child in module.modules() for name in buffer_names(child)]
        self._statistics = [buffer for buffer in self._buffers if buffer[1] in STATISTICS]
        self._others = [buffer for buffer in self._buffers if buffer[1] not in STATISTICS]
        self._changing: set[Buffer] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of norms' statistics: a repetition saves copies of them for backward, and the first run none."""
        values = (getattr(*buffer) for buffer in self._statistics)
        return sum(value.nbytes for value in values if isinstance(value, Tensor))

    def before(self) -> dict[Buffer, tuple[Any, int, Any]]:
        """What a run finds: each buffer, its version, and a copy of what may change."""
        found = {}
        for module, name in self._others:
            value = getattr(module, name)
            copied = self._changing is None or (module, name) in self._changing
            known = isinstance(value, Tensor)
            found[module, name] = value, version(value) if known else 0, value.clone() if copied and known else None
        return found

    def after(self, found: dict[Buffer, tuple[Any, int, Any]], where: str) -> dict[Buffer, Any]:
        """What a repetition must find, of buffers that have changed.

        Raises:
            RuntimeError: If one has changed that did not in the first run.
        """
        first = self._changing is None
        if self._changing is None:
            self._changing = set()
        old = {}
        for (module, name), (value, before, copy) in found.items():
            now = getattr(module, name)
            if now is value and (not isinstance(now, Tensor) or version(now) == before):
                continue
            if copy is None and isinstance(value, Tensor) and not first and now is value:
                raise RuntimeError(
                    f"The buffer {name} of {where} has changed for the first time after the first step, so that the "
                    "forward cannot be repeated. Leave its block out of the recomputation with blocks=[...]."
                )
            self._changing.add((module, name))
            old[module, name] = value if now is not value else copy
        return old

    @contextmanager
    def again(self, old: dict[Buffer, Any]) -> Iterator[None]:
        """Context in which the buffers are as they were, in other memory; the real ones are put back at its end."""
        temporary = {buffer: _cloned(getattr(*buffer)) for buffer in self._statistics} | {
            buffer: _cloned(value) for buffer, value in old.items()
        }
        now = {buffer: getattr(*buffer) for buffer in temporary}
        for (module, name), value in temporary.items():
            setattr(module, name, value)
        try:
            yield
        finally:
            for (module, name), value in now.items():
                setattr(module, name, value)


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
