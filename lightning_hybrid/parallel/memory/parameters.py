"""Parameters that live in host memory, and stream through a few buffers of a unit's size while units run.

While a unit runs its modules show copies in a buffer. What autograd saves of them is packed as a recipe, so that the
buffer serves other units until the backward pass asks for the unit again. Gradients go to the host, where they are
accumulated as always, and where the optimizer works.

Source: Cui et al. 2016, GeePS (EuroSys), sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.compat import own_parameters, refresh_weights, storage_key, version
from lightning_hybrid.functional.trees import leaves_of
from lightning_hybrid.parallel.memory.calls import Order, surround
from lightning_hybrid.parallel.memory.hooks import ChainedHooks, Packed, innermost, keep
from lightning_hybrid.parallel.memory.parameters_buffers import Buffer, Buffers
from lightning_hybrid.parallel.memory.parameters_host import StrayReads, move
from lightning_hybrid.parallel.memory.parameters_transfers import Transfers, fetched
from lightning_hybrid.parallel.memory.parameters_units import Region, Unit, choose_units, layered_modules
from lightning_hybrid.parallel.pipeline.probe_run import uncompiled
from lightning_hybrid.parallel.pipeline.provenance import Provenance


@dataclass(frozen=True)
class _Recipe:
    """What a graph holds of a parameter, or of a view of it."""

    buffers: Buffers
    unit: Unit
    parameter: nn.Parameter
    version: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # bytes within the parameter

    def unpack(self) -> Tensor:
        """The same view of whatever buffer the unit is in now.

        Raises:
            RuntimeError: If the parameter has been written to since, as autograd says it of what it holds itself.
        """
        if version(self.parameter) != self.version:
            raise RuntimeError(
                f"A parameter of {self.unit.name}, of shape {list(self.parameter.shape)}, that the backward pass needs "
                f"has been modified in place, {version(self.parameter) - self.version} time(s) since it was used."
            )
        memory = self.buffers.access(self.unit).memory
        start = next(region.start for region in self.unit.regions() if region.parameter is self.parameter)
        offset = (start + self.offset) // self.dtype.itemsize
        with torch.no_grad():
            return memory.view(self.dtype).as_strided(self.size, self.stride, offset).detach()


class ParameterStreaming:
    """Streams the parameters of a model from `install` to `remove`.

    Args:
        root: The model, whose parameters are in host memory, or are taken there one by one.
        blocks: Names of its blocks.
        device: Where it computes.
        num_buffers: Units that the device has at most, at least 2.

    Attributes:
        units: Blocks, and modules beside them.
        resident: Parameters that stay on the device: no module that is called as one has them, or they have been read
            past its calls.
        counts: What the buffers count.

    Raises:
        ValueError: If the model has no module with parameters that could be streamed.
    """

    def __init__(self, root: nn.Module, blocks: Sequence[str], device: torch.device, num_buffers: int) -> None:
        self.root, self.transfers = root, Transfers(device)
        self._hosts: dict[int, nn.Parameter] = {}
        self._copies: dict[int | None, tuple[Unit, Region]] = {}  # of a probe, by storage
        self.units = choose_units(root, blocks, self._hosts)
        inside = {parameter for unit in self.units for parameter in unit.module.parameters()}
        for parameter in inside:
            move(parameter, torch.device("cpu"), pin=self.transfers.has_streams)
        self.units = [unit for unit in self.units if unit.regions()]
        if not self.units:
            raise ValueError(f"{type(root).__name__} has no module with parameters that could be streamed.")
        streamed = self._streamed()
        self.resident = [p for p in root.parameters() if p not in streamed]
        for parameter in self.resident:
            move(parameter, device)
        self.buffers = Buffers(self.units, num_buffers, self.transfers)
        self.counts = self.buffers.counts
        self._watched, self._watch, self._stray = set[str](), ExitStack(), list[nn.Parameter]()
        self._units_of: dict[nn.Module, list[Unit]] = {}
        for unit in sorted(self.units, key=lambda unit: len(unit.modules)):
            for module in unit.modules:
                self._units_of.setdefault(module, []).append(unit)
        layered = dict.fromkeys(module for unit in self.units for module in layered_modules(unit))
        self._layers = [surround(module, Order.STREAM, partial(self._call, module)) for module in layered]

    @property
    def device_bytes(self) -> int:
        """Bytes of parameters that the device has at most: buffers, and what is resident."""
        return self.buffers.num_bytes + sum(p.numel() * p.element_size() for p in self.resident)

    def begin(self, kind: str) -> None:
        """A batch begins: what was copied for the last one does not count.

        Args:
            kind: Batches of one kind read units in the same order.
        """
        if self.transfers.is_apart and kind not in self._watched:  # on the CPU any read finds its values
            self._watched.add(kind)
            reads = StrayReads(self._streamed(), self.transfers.device)
            self._stray = reads.found
            self._watch.enter_context(uncompiled())
            self._watch.enter_context(reads)
        self.buffers.begin(kind)

    def end(self) -> list[nn.Parameter]:
        """A batch has ended. What was read past its module's calls stays on the device from now on, and is returned."""
        self._watch.close()
        stray, self._stray = self._stray, []
        for parameter in stray:
            move(parameter, self.transfers.device)
        self.resident += stray
        return stray

    def remove(self) -> None:
        """Let modules be as they were, with parameters on the host; a backward pass that is still to come may run."""
        self._watch.close()
        self.transfers.synchronize()
        for away in self._layers:
            away()
        self._layers = []

    def _streamed(self) -> set[nn.Parameter]:
        return {region.parameter for unit in self.units for region in unit.regions()}

    def _call(
        self, module: nn.Module, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Around each call of a unit, and of a part of it that may be called alone."""
        units = self._units_of[module]
        if any(unit.depth for unit in units):
            with self._recipes():
                return proceed(*args, **kwargs)
        with self._running(units[0]), self._recipes():
            output = proceed(*args, **kwargs)
        self._check(units[0], output)
        return output

    @contextmanager
    def _recipes(self) -> Iterator[None]:
        """Hooks that are innermost: those of a checkpoint within a unit see in both of its runs what they leave."""
        if innermost(self._pack):
            yield
            return
        with ChainedHooks(self._pack):
            yield

    @contextmanager
    def _running(self, unit: Unit) -> Iterator[None]:
        regions = unit.regions()
        if not regions:
            yield
            return
        buffer = None if Provenance.depth else self.buffers.access(unit)
        before = version(buffer.memory) if buffer is not None else 0
        shown = [(region, self._shown(unit, region, buffer)) for region in regions]
        unit.depth += 1
        replaced = [self._show(*place, tensor) for region, tensor in shown for place in region.places]
        self._refresh(regions)
        try:
            yield
        finally:
            unit.depth -= 1
            for module, name, tensor in reversed(replaced):
                own_parameters(module)[name] = tensor
            self._refresh(regions)
            for _, tensor in shown:
                self._hosts.pop(id(tensor), None)
            self._copies.clear()
            if buffer is not None and version(buffer.memory) != before:
                self._write_back(regions, buffer)

    def _shown(self, unit: Unit, region: Region, buffer: Buffer | None) -> Tensor:
        """What stands for a parameter. A probe follows values by their memory, so there each has its own."""
        if buffer is None:
            shown: Tensor = region.parameter.to(self.transfers.device)
            if shown is not region.parameter:
                self._copies[storage_key(shown)] = unit, region
        else:
            with torch.no_grad():
                copy = region.within(buffer.memory)
            shown = fetched(region.parameter, copy, self.transfers)
        if shown is not region.parameter:
            self._hosts[id(shown)] = region.parameter
        return shown

    @staticmethod
    def _show(module: nn.Module, name: str, tensor: Tensor) -> tuple[nn.Module, str, Any]:
        before = own_parameters(module)[name]
        own_parameters(module)[name] = tensor
        return module, name, before

    @staticmethod
    def _refresh(regions: Sequence[Region]) -> None:
        for module in {module for region in regions for module, _ in region.places}:
            refresh_weights(module)

    @staticmethod
    @torch.no_grad()
    def _write_back(regions: Sequence[Region], buffer: Buffer) -> None:
        """What the unit has written to its parameters, as an embedding with a `max_norm` does."""
        for region in regions:
            written = region.within(buffer.memory).to("cpu")
            if not torch.equal(written, region.parameter):
                region.parameter.copy_(written)

    def _pack(self, tensor: Tensor) -> Packed | None:
        found = self._origin(tensor)
        if found is None:
            return None
        if tensor.is_conj() or tensor.is_neg():
            return keep(tensor.clone())
        unit, parameter, offset = found
        geometry = tensor.dtype, tensor.size(), tensor.stride(), offset
        return _Recipe(self.buffers, unit, parameter, version(parameter), *geometry)

    def _origin(self, tensor: Tensor) -> tuple[Unit, nn.Parameter, int] | None:
        """The parameter that a tensor on the device is of, and the bytes before it in that one."""
        key = _storage(tensor)
        start = 0 if key is None else int(tensor.storage_offset()) * tensor.element_size()
        if key in self._copies:
            unit, region = self._copies[key]
            return unit, region.parameter, start
        buffer = self.buffers.of(key)
        if buffer is None or buffer.unit is None:
            return None
        region = [region for region in buffer.unit.regions() if region.start <= start][-1]
        return buffer.unit, region.parameter, start - region.start

    def _check(self, unit: Unit, output: Any) -> None:
        """Refuse what would change its values when the buffer is used again.

        Raises:
            RuntimeError: Naming the unit.
        """
        for leaf in leaves_of(output):
            if isinstance(leaf, Tensor) and self.buffers.of(_storage(leaf)) is not None:
                raise RuntimeError(
                    f"{unit.name} returns one of its parameters, or a view of one, of shape {list(leaf.shape)}: its "
                    "memory is used for other parameters next. Return a copy (weight.clone()), or leave the module "
                    "out of ParameterOffload."
                )


def _storage(tensor: Tensor) -> int | None:
    if tensor.layout is not torch.strided:
        return None
    try:
        return storage_key(tensor)
    except NotImplementedError:  # a wrapper without storage
        return None
