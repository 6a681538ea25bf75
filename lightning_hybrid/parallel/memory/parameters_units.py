"""Units of parameters that come to the device together: blocks, and modules beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_hybrid.compat import is_compiled, own_parameters, version
from lightning_hybrid.parallel.memory.partitioned import is_dense
from lightning_hybrid.parallel.pipeline.cut import ancestors_of, outside_modules

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # nobody calls them
ALIGNMENT = 256
"""Bytes: kernels for addresses of the allocator run on these too, and so give the same bits."""


@dataclass(frozen=True)
class Region:
    """One parameter in a buffer.

    Attributes:
        parameter: On the host.
        places: Modules that show it, with the attributes' names.
        start: Bytes before it, a multiple of `ALIGNMENT`.
    """

    parameter: nn.Parameter
    places: list[tuple[nn.Module, str]]
    start: int

    @property
    def end(self) -> int:
        """First byte behind it."""
        return self.start + self.parameter.numel() * self.parameter.element_size()

    def within(self, memory: Tensor) -> Tensor:
        """Its copy in a buffer, uint8 `[bytes]`; it counts writes together with all that is in the buffer."""
        like = self.parameter
        part = memory[self.start : self.end].view(like.dtype)
        return part.as_strided(like.size(), like.stride(), part.storage_offset()).detach()


class Unit:
    """A module whose parameters, and those of all modules inside, are in one buffer while any of them runs.

    Args:
        name: Its dotted name.
        module: It.
        hosts: Parameters by the identity of tensors that stand for them now.

    Attributes:
        depth: How many of its calls are under way.
    """

    def __init__(self, name: str, module: nn.Module, hosts: Mapping[int, nn.Parameter]) -> None:
        self.name, self.module, self._hosts = name, module, hosts
        self.modules = list(module.modules())
        self.depth = 0

    def regions(self) -> list[Region]:
        """Its parameters and where they are in a buffer: as they are now, for a pipeline may let go of some."""
        places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in self.modules:
            for name, tensor in own_parameters(module).items():
                parameter = self._hosts.get(id(tensor), tensor)
                if parameter is not None and is_streamable(parameter):
                    places.setdefault(parameter, []).append((module, name))
        regions, start = list[Region](), 0
        for parameter, shown in places.items():
            regions.append(Region(parameter, shown, start))
            start = ceil(regions[-1].end / ALIGNMENT) * ALIGNMENT
        return regions

    @property
    def num_bytes(self) -> int:
        """Bytes of a buffer for it."""
        regions = self.regions()
        return ceil(regions[-1].end / ALIGNMENT) * ALIGNMENT if regions else 0


def state_of(regions: Iterable[Region]) -> list[tuple[Any, ...]]:
    """What is equal as long as nobody has written to the parameters or replaced them."""
    parameters = [(region.parameter, region.start) for region in regions]
    return [(id(p), version(p), p.data_ptr(), p.dtype, start) for p, start in parameters]


def is_streamable(parameter: Tensor) -> bool:
    """Whether it is a plain dense tensor on the host; all else stays where it is."""
    if isinstance(parameter, DTensor) or not isinstance(parameter, nn.Parameter) or parameter.is_meta:
        return False
    if parameter.layout is not torch.strided or not parameter.numel() or parameter.device.type != "cpu":
        return False
    return is_dense(parameter)


def choose_units(root: nn.Module, blocks: Iterable[str], hosts: Mapping[int, nn.Parameter]) -> list[Unit]:
    """The blocks, and beside them the largest modules that are called.

    Parameters of modules that hold units, such as the root's own, are in none.

    Args:
        root: The model.
        blocks: Names of blocks.
        hosts: For the units.
    """
    blocks = list(blocks)
    names = [*blocks, *outside_modules(root, {"", *ancestors_of(blocks)}, set(blocks))]
    units = dict[nn.Module, Unit]()  # a module may have a second name
    while names:
        name = names.pop(0)
        module = root.get_submodule(name)
        if isinstance(module, CONTAINERS):
            names += [f"{name}.{child}" for child, _ in module.named_children()]
        elif any(True for _ in module.parameters()):
            units.setdefault(module, Unit(name, module, hosts))
    return list(units.values())


def layered_modules(unit: Unit) -> list[nn.Module]:
    """The unit's module, and those inside with parameters of their own; a compiled module is one piece.

    They may be called past the unit, as a part of a block is when an activation checkpoint runs that part again.
    """
    found, waiting = list[nn.Module](), [unit.module]
    while waiting:
        module = waiting.pop()
        if module is unit.module or any(True for _ in module.parameters(recurse=False)):
            found.append(module)
        if not is_compiled(module):
            waiting += [child for child in module.children() if not isinstance(child, torch.jit.ScriptModule)]
    return found
