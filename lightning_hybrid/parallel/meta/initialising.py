"""Initial values of a model that was built on the meta device: part by part, each module from a seed of its own name.

A tensor's values depend on the seed and on the module that owns it, and on nothing else: not on the layout, the rank,
or what was made before. So no rank has to hold what others need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.compat import (
    copied_structure,
    private_reset,
    storage_key,
    weights_method,
)
from lightning_hybrid.parallel.meta.writes import Apart, Writes
from lightning_hybrid.parallel.pipeline.cut import ancestors_of
from lightning_hybrid.parallel.streams import Streams

WAY_OUT = (
    "Give the class a reset_parameters() that writes them, or build them on a real device: with torch.device('cpu')."
)


class Initialiser:
    """Makes the tensors of a model that are on the meta device, one part of the model at a time.

    A part is a block, or a module beside the blocks; the own tensors of a module that contains blocks are one too. In a
    part, children come first. A module with tensors to be made, its own or in it, runs `reset_parameters()`, as torch's
    layers have it, and then the `_init_weights(module)` of the nearest module around it that has one, as transformers'
    models have it. A module that contains blocks does so last, once in each part that it writes to, while everything
    else is on the meta device; so it may write what it likes, and read no values.

    Args:
        root: The model, not yet cut, split or sharded. It is left alone: what is kept of it is its structure.
        blocks: Dotted names of its blocks.

    Attributes:
        first: First name of each tensor to be made, by any of its names.
        parts: The part that makes it, by its first name: of a shared tensor the first that holds it.
    """

    def __init__(self, root: nn.Module, blocks: Sequence[str]) -> None:
        ancestors = ancestors_of(blocks) | {""}
        real = dict[int, Tensor]()
        self._root = _structure(root, {}, real)
        found = dict[int, str]()
        self.first = {
            name: found.setdefault(id(tensor), name)
            for name, tensor in named_tensors(self._root)
            if id(tensor) not in real
        }
        self.parts = {name: _part_of(name.rpartition(".")[0], ancestors) for name in self.first.values()}
        self._modules: dict[str, list[tuple[str, nn.Module]]] = {part: [] for part in self.parts.values()}
        self._members: dict[str, list[tuple[str, nn.Module]]] = {part: [] for part in self.parts.values()}
        modules = list(reversed(list(self._root.named_modules())))  # children before what contains them
        for name, module in modules:
            part = _part_of(name, ancestors)
            if part in self._modules:
                self._modules[part].append((name, module))
                inside = own_tensors(module) if name in ancestors else named_tensors(module)
                if any(id(tensor) not in real for _, tensor in inside):
                    self._members[part].append((name, module))
        self._around = {module: name for name, module in modules if name in ancestors and list(module.children())}
        for module, name in self._around.items():
            for part in self._written_by(name, module) - {name}:
                self._members[part].append((name, module))
        near = {id(t) for modules in self._modules.values() for _, m in modules for _, t in own_tensors(m)}
        self._real = {key: tensor for key, tensor in real.items() if key in near}  # initialisers may read them

    def check(self) -> None:
        """Run everything on the meta device, where it costs nothing.

        Raises:
            ValueError: If a tensor is not written, or no module shows it as a parameter or buffer.
        """
        for name, module in self._root.named_modules():
            for attribute, value in vars(module).items():
                if isinstance(value, Tensor) and value.is_meta:
                    raise ValueError(
                        f"{_dotted(name, attribute)} is a tensor on the meta device, and neither a parameter nor a "
                        "buffer: nothing gives it values. Register it with register_buffer, or build it on a real "
                        "device: with torch.device('cpu')."
                    )
        for part in self._members:
            before, writes = self._within_reach(part), Writes()
            keys = {name: storage_key(tensor) for name, tensor in before[part].items()}
            with torch.no_grad(), Streams(torch.device("cpu")), writes:
                for name, module in self._members[part]:
                    try:
                        self._initialise(name, module)
                    except Exception:  # it looks at values: whether it works is seen when they are made
                        writes.seen.update(storage_key(tensor) for _, tensor in named_tensors(module))
            after = self._own(part)
            self._put_back(before)
            replaced = {name for name, key in keys.items() if storage_key(after[name]) != key}
            missing = [n for n in self._made_by(part) if n not in replaced and keys[n] not in writes.seen]
            if missing:
                self._refuse(missing)

    def make(self, part: str, seed: int, device: torch.device) -> dict[str, Tensor]:
        """Make one part, in memory of its own; random streams are as before afterwards.

        Args:
            part: One of `parts`.
            seed: Of the whole run.
            device: Where to make it.

        Returns:
            Whole tensors by their first names, of the types that the untouched model has.
        """
        before, memory = self._within_reach(part), dict[int, Tensor]()
        with torch.inference_mode(False), torch.no_grad(), Streams(device) as streams:
            for tensor in before[part].values():
                if id(tensor) not in memory:
                    memory[id(tensor)] = _memory(tensor, self._real.get(id(tensor)), device)
            self._put(part, {name: memory[id(tensor)] for name, tensor in before[part].items()})
            try:
                for name, module in self._members[part]:
                    is_around = module in self._around
                    streams.seed(seed, "initialise", name, *([part] if is_around and part != name else []))
                    with Apart(name, module) if is_around else nullcontext():
                        self._initialise(name, module)
                made = self._own(part)
                return {name: made[name].detach().to(device) for name in self._made_by(part)}
            finally:
                self._put_back(before)

    def _written_by(self, name: str, module: nn.Module) -> set[str]:
        """The parts of which a module that contains blocks writes tensors.

        Raises:
            ValueError: If it reads values, so that it cannot be run for one part at a time.
        """
        before, writes = {part: self._own(part) for part in self._modules}, Writes()
        keys = {part: {name: storage_key(t) for name, t in tensors.items()} for part, tensors in before.items()}
        try:
            with torch.no_grad(), Streams(torch.device("cpu")), writes, Apart(name, module):
                self._initialise(name, module)
            after = {part: {name: storage_key(t) for name, t in self._own(part).items()} for part in before}
        finally:
            self._put_back(before)
        replaced = {
            n for part, own in keys.items() for n, key in own.items() if key in writes.seen or after[part][n] != key
        }
        return {self.parts[self.first[n]] for n in replaced if n in self.first}

    def _initialise(self, name: str, module: nn.Module) -> None:
        reset: Any = getattr(module, "reset_parameters", None) or private_reset(module)
        if _takes(reset):
            reset()
        names = name.split(".") if name else []
        for enclosing in [".".join(names[:i]) for i in range(len(names), -1, -1)]:
            method = weights_method(self._root.get_submodule(enclosing))
            if method is not None and _takes(method, module):
                method(module)
                return

    def _made_by(self, part: str) -> list[str]:
        return [name for name, maker in self.parts.items() if maker == part]

    def _own(self, part: str) -> dict[str, Tensor]:
        """What the modules of a part hold themselves, under all names."""
        return {
            _dotted(name, leaf): tensor for name, module in self._modules[part] for leaf, tensor in own_tensors(module)
        }

    def _put(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        for name, module in self._modules[part]:
            for leaf, _ in own_tensors(module):
                put(module, leaf, tensors[_dotted(name, leaf)])

    def _within_reach(self, part: str) -> dict[str, dict[str, Tensor]]:
        """What the initialisers of a part may replace: of each part in question, what its modules hold."""
        is_wide = any(module in self._around for _, module in self._members[part])
        return {other: self._own(other) for other in (self._modules if is_wide else [part])}

    def _put_back(self, before: Mapping[str, Mapping[str, Tensor]]) -> None:
        for part, tensors in before.items():
            self._put(part, tensors)

    def _refuse(self, missing: list[str]) -> None:
        name = missing[0].rpartition(".")[0]
        kind = type(self._root.get_submodule(name)).__name__
        raise ValueError(
            f"{missing[0]} is on the meta device, and nothing initialises it: neither {kind}.reset_parameters() nor an "
            f"_init_weights(module) of a module around {name or 'it'} writes it. Without values are "
            f"{', '.join(missing[:5])} ({len(missing)} tensors). {WAY_OUT}"
        )


def named_tensors(root: nn.Module) -> list[tuple[str, Tensor]]:
    """All parameters and then all buffers, under each of their names."""
    buffers = root.named_buffers(remove_duplicate=False)
    return [*root.named_parameters(remove_duplicate=False), *buffers]


def own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """A module's own parameters and buffers."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return [*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)]


def put(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace one of a module's own parameters or buffers; it is told, as `nn.LSTM` has to be."""
    setattr(module, name, tensor)


def has_meta(root: nn.Module) -> bool:
    """Whether any parameter or buffer is on the meta device."""
    return any(tensor.is_meta for _, tensor in named_tensors(root))


def _structure(module: nn.Module, memo: dict[int, Any], real: dict[int, Tensor]) -> nn.Module:
    """A copy of all modules, with tensors on the meta device alone; what is shared stays shared.

    Args:
        module: The original.
        memo: Copies of modules and tensors, by the identity of the original.
        real: Is given the originals that are not on the meta device, by the identity of the copy.
    """
    if id(module) not in memo:
        copy = memo[id(module)] = copied_structure(module)
        for name, child in list(module.named_children()):
            copy.register_module(name, _structure(child, memo, real))
        for name, tensor in own_tensors(module):
            if id(tensor) not in memo:
                memo[id(tensor)] = _empty_like(tensor, torch.device("meta"))
                if not tensor.is_meta:
                    real[id(memo[id(tensor)])] = tensor
            put(copy, name, memo[id(tensor)])
    found: nn.Module = memo[id(module)]
    return found


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty_like(tensor, device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _memory(tensor: Tensor, real: Tensor | None, device: torch.device) -> Tensor:
    """Memory to be written; of what is real a copy, since initialisers write that too."""
    memory = _empty_like(tensor, device)
    if real is not None:
        memory.copy_(real)
    return memory


def _part_of(module: str, ancestors: set[str]) -> str:
    """The part that makes a module's tensors: the largest module around it that contains no block."""
    names = module.split(".")
    prefixes = [".".join(names[: i + 1]) for i in range(len(names))]
    return next((prefix for prefix in prefixes if prefix not in ancestors), module)


def _takes(method: Callable[..., Any] | None, *args: object) -> bool:
    """Whether it is a method that can be called like this."""
    if not callable(method):
        return False
    try:
        signature(method).bind(*args)
    except TypeError:
        return False
    return True


def _dotted(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name
