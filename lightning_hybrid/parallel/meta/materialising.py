"""Makes the tensors of one rank's model that are on the meta device: what it holds of a part, one part at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.parallel.meta.initialising import Initialiser, has_meta, named_tensors, own_tensors, put
from lightning_hybrid.parallel.pipeline.cut import StageCut
from lightning_hybrid.parallel.zero.shards import shard_like


class Materialiser:
    """Turns tensors on the meta device into what this rank holds of them.

    Besides what the rank keeps there is never more than one whole part in memory.

    Args:
        root: The model, cut and split; perhaps sharded when `fill` is called.
        initialiser: Of the untouched model.
        seed: Of the whole run.
        device: Where to make parts.
        cut: This rank's view of the model; None without a pipeline.
        part: Gives this rank's slice of a whole value by its name; None where all are whole.
        home: Where shards live; None for `device`.
    """

    def __init__(
        self,
        root: nn.Module,
        initialiser: Initialiser,
        seed: int,
        device: torch.device,
        *,
        cut: StageCut | None = None,
        part: Callable[[str, Any], Any] | None = None,
        home: torch.device | None = None,
    ) -> None:
        self.root, self.seed, self.device = root, seed, device
        self._initialiser, self._part, self._home = initialiser, part, home or device
        if cut is not None:
            _fill_absent_buffers(cut)

    @torch.inference_mode(False)
    def fill(self, kept_back: Collection[str] = ()) -> None:
        """Make all that is on the meta device here.

        Args:
            kept_back: Names of parameters that stay there.
        """
        missing: dict[str, dict[str, list[str]]] = {}
        for name, tensor in named_tensors(self.root):
            if tensor.is_meta and name not in kept_back:
                first = self._initialiser.first[name]
                missing.setdefault(self._initialiser.parts[first], {}).setdefault(first, []).append(name)
        for part, names in missing.items():
            made = self._initialiser.make(part, self.seed, self.device)
            for first, known in names.items():
                tensor = self._like(first, made.pop(first), get(self.root, known[0]))
                for name in known:
                    assign(self.root, name, tensor)

    @torch.inference_mode(False)
    def make(self, names: Sequence[str]) -> dict[str, nn.Parameter]:
        """This rank's slices of parameters that are on the meta device; they are not put into the model.

        Args:
            names: Any of their names.
        """
        made: dict[str, Tensor] = {}
        for part in dict.fromkeys(self._initialiser.parts[self._initialiser.first[name]] for name in names):
            made |= self._initialiser.make(part, self.seed, self.device)
        shared: dict[str, nn.Parameter] = {}
        for name in names:
            first = self._initialiser.first[name]
            if first not in shared:
                slices = self._like(first, made.pop(first), get(self.root, name))
                assert isinstance(slices, nn.Parameter)
                shared[first] = slices
        return {name: shared[self._initialiser.first[name]] for name in names}

    def lonely(self, blocks: Sequence[str]) -> dict[str, list[str]]:
        """Of each block, the names of parameters on the meta device that nothing else holds too."""
        places: dict[str, set[str]] = {}
        found: dict[str, list[str]] = {}
        for name, parameter in self.root.named_parameters(remove_duplicate=False):
            if parameter.is_meta:
                block = next((block for block in blocks if name.startswith(f"{block}.")), "")
                places.setdefault(self._initialiser.first[name], set()).add(block)
                found.setdefault(block, []).append(name)
        return {
            block: [name for name in names if len(places[self._initialiser.first[name]]) == 1]
            for block, names in found.items()
            if block
        }

    def _like(self, first: str, whole: Tensor, old: Tensor) -> Tensor:
        """A whole tensor as this rank holds it: its type, slice and shard."""
        value = whole.to(old.dtype)
        value = value if self._part is None else self._part(first, value)
        value = shard_like(value, old, self._home)
        return nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value


def get(root: nn.Module, name: str) -> Tensor:
    """A parameter or buffer by its dotted name."""
    parent, _, leaf = name.rpartition(".")
    return dict(own_tensors(root.get_submodule(parent)))[leaf]


def assign(root: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter or buffer."""
    parent, _, leaf = name.rpartition(".")
    put(root.get_submodule(parent), leaf, tensor)


def initialise_whole(root: nn.Module, seed: int, device: torch.device, blocks: Sequence[str] = ()) -> None:
    """Make all of an untouched model in this process; nothing happens where nothing is on the meta device.

    Raises:
        ValueError: If a module cannot initialise its tensors.
    """
    if has_meta(root):
        initialiser = Initialiser(root, blocks)
        initialiser.check()
        Materialiser(root, initialiser, seed, device).fill()


@contextmanager
def initialised(root: nn.Module, seed: int, device: torch.device, blocks: Sequence[str] = ()) -> Iterator[None]:
    """Context in which all of an untouched model is in this process."""
    places = _on_meta(root)
    initialise_whole(root, seed, device, blocks)
    try:
        yield
    finally:
        for module, name, tensor in places:
            put(module, name, tensor)


@contextmanager
def without_meta(root: nn.Module) -> Iterator[None]:
    """Context in which modules lack what is on the meta device: `Module.to` cannot move it."""
    places = _on_meta(root)
    for module, name, _ in places:
        setattr(module, name, None)
    try:
        yield
    finally:
        for module, name, tensor in places:
            put(module, name, tensor)


def _on_meta(root: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    return [(module, name, t) for module in root.modules() for name, t in own_tensors(module) if t.is_meta]


def _fill_absent_buffers(cut: StageCut) -> None:
    """Blocks of other stages keep their buffers here, which nobody reads: zeros do."""
    absent = [f"{block}." for i, block in enumerate(cut.blocks) if cut.stage_of_block(i) not in cut.stages]
    for name, buffer in list(cut.root.named_buffers(remove_duplicate=False)):
        is_here = cut.root.get_submodule(name.rpartition(".")[0]) in cut.present  # by another name
        if buffer.is_meta and not is_here and any(name.startswith(block) for block in absent):
            assign(cut.root, name, torch.zeros_like(buffer, device=cut.device))
