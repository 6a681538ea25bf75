"""The stage cut: which parts of an unmodified model this rank holds, and the gates that run it as any of its stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hybrid.parallel.pipeline.gates import Gate, GateKeeper, add_gate, hollow


class StageCut:
    """One rank's view of the model: its chunks' blocks, and all outside the blocks until a probe says otherwise.

    Args:
        root: The whole model; it is changed in place.
        blocks: Dotted names of all blocks, in order.
        sizes: Blocks of each stage; their number is pipeline size times chunks.
        pipeline: Number of pipeline ranks.
        rank: This rank's position among them.
        device: Where the model lives or is going to.

    Attributes:
        names: Names of every parameter of the whole model in its order, shared ones once.
        aliases: Second names of shared parameters, to the name in `names`.
        parameters: The parameters that are here, by name.
        block_stages: For each parameter that belongs to blocks, the stages of those.
        outside: Names of parameters reachable outside the blocks: every rank holds them until `release`.
        stand_ins: What took the place of absent parameters, by name.
        ancestors: Names of the modules that contain blocks.
        guarded: (module, attribute) that blocks set while they run, readable by their own stage only.
        written_buffers: Buffers that blocks write while they run, with their stage.
        present: Modules that are beside the blocks or in blocks of this rank, by any of their names.
        searched: A training probe has looked for values held where no module shows them.
    """

    def __init__(
        self,
        root: nn.Module,
        blocks: Sequence[str],
        sizes: Sequence[int],
        *,
        pipeline: int,
        rank: int,
        device: torch.device,
    ) -> None:
        self.root, self.blocks, self.pipeline, self.rank, self.device = root, list(blocks), pipeline, rank, device
        self.bounds = [0, *accumulate(sizes)]
        self.keeper = GateKeeper(device)
        self.num_stages = len(sizes)
        self.stages = list(range(rank, self.num_stages, pipeline))
        first: dict[int, str] = {}
        self.aliases: dict[str, str] = {}
        for name, parameter in root.named_parameters(remove_duplicate=False):
            if first.setdefault(id(parameter), name) != name:
                self.aliases[name] = first[id(parameter)]
        self.names = [name for name, _ in root.named_parameters()]
        self._order = [name for name, _ in root.named_parameters(remove_duplicate=False)]
        self._trainable = {name: parameter.requires_grad for name, parameter in root.named_parameters()}
        self.parameters: dict[str, nn.Parameter] = dict(root.named_parameters())
        self.block_stages: dict[str, set[int]] = {}
        self.stand_ins: dict[str, Tensor] = {}
        self.guarded: set[tuple[str, str]] = set()
        self.written_buffers: dict[str, int] = {}
        self.searched = False
        self.gates: list[Gate] = []
        self._find_owners()
        self._add_gates()
        self._drop_absent_blocks()

    def blocks_of_stage(self, stage: int) -> range:
        """Positions of a stage's blocks."""
        return range(self.bounds[stage], self.bounds[stage + 1])

    def stage_of_block(self, position: int) -> int:
        """The stage that owns a block."""
        return next(stage for stage in range(self.num_stages) if position in self.blocks_of_stage(stage))

    def loose_buffers(self) -> list[tuple[str, Tensor]]:
        """Buffers that belong to no gated module: the step itself, or a module that contains blocks, writes them."""
        gates = [f"{gate.name}." for gate in self.gates]
        return [(name, b) for name, b in self.root.named_buffers() if not any(name.startswith(gate) for gate in gates)]

    def is_readable(self, stage: int) -> bool:
        """Whether values that `stage` left in its blocks belong to the run under way."""
        return stage in self.stages and (self.keeper.active is None or self.keeper.active.stage == stage)

    def release(self, name: str) -> nn.Parameter:
        """Let go of a parameter that no run on this rank needs; a stand-in takes its place."""
        parameter = self.parameters.pop(name)
        for alias in self.names_of(name):
            if alias not in self.stand_ins:
                self._hollow(alias)
        return parameter

    @contextmanager
    def listed(self) -> Iterator[None]:
        """Context in which stand-ins are among the parameters: a step that goes over all of them meets them."""
        split = {name: name.rpartition(".") for name in self.stand_ins}
        places = {name: (self.root.get_submodule(parent), leaf) for name, (parent, _, leaf) in split.items()}
        for name, (module, leaf) in places.items():
            del module.__dict__[leaf]
            module.register_parameter(leaf, nn.Parameter(self.stand_ins[name], requires_grad=False))
        try:
            yield
        finally:
            for name, (module, leaf) in places.items():
                delattr(module, leaf)
                module.__dict__[leaf] = self.stand_ins[name]

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Context in which the module has all of its parameters, for optimizers to be made; absent ones are empty."""
        everything = dict(self.parameters)
        for name, stand_in in self.stand_ins.items():
            first = self.aliases.get(name, name)
            everything.setdefault(first, nn.Parameter(stand_in, requires_grad=self._trainable[first]))
        owners: dict[str, list[str]] = {}
        for name in self._order:
            owners.setdefault(name.rpartition(".")[0], []).append(name)
        hollowed = {parent for parent, names in owners.items() if not self.stand_ins.keys().isdisjoint(names)}
        for parent in hollowed:
            module = self.root.get_submodule(parent)
            present = dict(module.named_parameters(recurse=False, remove_duplicate=False))
            for name in owners[parent]:  # all anew, so that they stand in the model's order
                leaf = name.rpartition(".")[2]
                parameter = present.get(leaf)
                delattr(module, leaf)
                module.register_parameter(
                    leaf, everything[self.aliases.get(name, name)] if parameter is None else parameter
                )
        try:
            yield
        finally:
            for name, stand_in in self.stand_ins.items():
                parent, _, leaf = name.rpartition(".")
                delattr(self.root.get_submodule(parent), leaf)
                vars(self.root.get_submodule(parent))[leaf] = stand_in

    def names_of(self, name: str) -> list[str]:
        """All names of a parameter."""
        return [name, *(alias for alias, target in self.aliases.items() if target == name)]

    def refresh(self) -> None:
        """Look the parameters up again, after something (`fully_shard`) has replaced them."""
        present = dict(self.root.named_parameters(remove_duplicate=False))
        self.parameters = {
            name: next((present[known] for known in self.names_of(name) if known in present), old)
            for name, old in self.parameters.items()
        }

    def _find_owners(self) -> None:
        prefixes = {f"{block}.": self.stage_of_block(position) for position, block in enumerate(self.blocks)}
        self.outside: set[str] = set()
        for name in [*self.names, *self.aliases]:
            owner = next((stage for prefix, stage in prefixes.items() if name.startswith(prefix)), None)
            if owner is None:
                self.outside.add(self.aliases.get(name, name))
            else:
                self.block_stages.setdefault(self.aliases.get(name, name), set()).add(owner)

    def _add_gates(self) -> None:
        self.ancestors = ancestors_of(self.blocks)
        for position, name in enumerate(self.blocks):
            owned = self.stage_of_block(position) in self.stages
            self._add_gate(Gate(self.keeper, name, position, owned=owned))
        gated: set[int] = set()
        for name in outside_modules(self.root, self.ancestors, set(self.blocks)):
            module = self.root.get_submodule(name)
            if id(module) not in gated:  # a shared embedding has several names and one gate
                gated.add(id(module))
                self._add_gate(Gate(self.keeper, name, None, owned=True))

    def _add_gate(self, gate: Gate) -> None:
        self.gates.append(gate)
        add_gate(self.root.get_submodule(gate.name), gate)

    def _drop_absent_blocks(self) -> None:
        here = set(self.stages)
        absent = [b for position, b in enumerate(self.blocks) if self.stage_of_block(position) not in here]
        prefixes = tuple(f"{block}." for block in absent)
        everywhere = self.root.named_modules(remove_duplicate=False)
        self.present = {module for name, module in everywhere if not f"{name}.".startswith(prefixes)}
        for block in absent:
            for name, _ in list(self.root.get_submodule(block).named_parameters(prefix=block, remove_duplicate=False)):
                if self.root.get_submodule(name.rpartition(".")[0]) not in self.present:
                    self._hollow(name)
        for name, stages in self.block_stages.items():
            if not stages & here and name not in self.outside:
                del self.parameters[name]

    def _hollow(self, name: str) -> None:
        parent, _, leaf = name.rpartition(".")
        module = self.root.get_submodule(parent)
        if leaf in dict(
            module.named_parameters(recurse=False, remove_duplicate=False)
        ):  # a shared module has lost it under its other name
            self.stand_ins[name] = hollow(module, leaf, self.device)


def ancestors_of(blocks: Sequence[str]) -> set[str]:
    """Names of the modules that contain blocks, the root "" among them."""
    parts = [block.split(".") for block in blocks]
    return {".".join(names[:i]) for names in parts for i in range(len(names))}


def outside_modules(root: nn.Module, ancestors: set[str], blocks: set[str]) -> list[str]:
    """The largest modules with parameters or buffers that hold no block and lie in none."""
    found: list[str] = []
    for ancestor in sorted(ancestors):
        for child_name, child in root.get_submodule(ancestor).named_children():
            name = f"{ancestor}.{child_name}" if ancestor else child_name
            if name not in ancestors and name not in blocks and _has_state(child):
                found.append(name)
    return found


def _has_state(module: nn.Module) -> bool:
    if isinstance(module, Metric):  # called for what it keeps, not for what it returns
        return False
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())
