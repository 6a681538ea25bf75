"""Values that a stage leaves on the side, where another stage's code may look for them in vain."""

from __future__ import annotations

import gc
import warnings
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FrameType
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hybrid.parallel.pipeline.cut import StageCut
from lightning_hybrid.parallel.pipeline.gates import guard_attribute
from lightning_hybrid.parallel.pipeline.probe_run import ProbeRun
from lightning_hybrid.parallel.pipeline.provenance import LIVE, tensors_of
from lightning_hybrid.parallel.pipeline.snapshot import Snapshot

WAY_OUT = (
    "Values recorded on the side do not cross stages: pass them through the blocks, or add a loss made inside a block "
    "with lightning_hybrid.add_auxiliary_loss(x, loss)."
)


@dataclass
class Recorded:
    """What blocks set on themselves while they run.

    Attributes:
        attributes: (module, attribute) of plain attributes.
        buffers: (module, buffer) of buffers.
    """

    attributes: list[tuple[str, str]] = field(default_factory=list)
    buffers: list[tuple[str, str]] = field(default_factory=list)

    def after(self, earlier: Recorded) -> Recorded:
        """With what earlier stages set."""
        return Recorded(earlier.attributes + self.attributes, earlier.buffers + self.buffers)


def find_recorded(cut: StageCut, run: ProbeRun, snapshot: Snapshot) -> Recorded:
    """What the blocks of a stage set on the way.

    Raises:
        RuntimeError: If a stage before the last leaves a value on a module outside its blocks or in a list or object,
            or a stage writes a buffer that another one has too.
    """
    found, inside = Recorded(), set[int]()
    for position in run.blocks:
        block = cut.blocks[position]
        for name, module in cut.root.get_submodule(block).named_modules(prefix=block):
            inside.add(id(module))
            found.attributes += [(name, attribute) for attribute, _ in snapshot.changed(module)]
            found.buffers += [(name, buffer) for buffer in snapshot.changed_buffers(module)]
    _refuse_shared(cut, run, found.buffers)
    if not run.is_last:
        for name, module in cut.root.named_modules():
            if id(module) not in inside and not isinstance(module, Metric):
                for attribute, value in snapshot.changed(module):
                    if any(run.provenance.of(tensor) & LIVE for tensor in tensors_of(value)):
                        _refuse(cut, run, f"{(name + '.') if name else 'self.'}{attribute}")
    return found


def _refuse_shared(cut: StageCut, run: ProbeRun, buffers: Iterable[tuple[str, str]]) -> None:
    elsewhere = [block for position, block in enumerate(cut.blocks) if position not in run.blocks]
    others = {module: block for block in elsewhere for module in cut.root.get_submodule(block).modules()}
    for name, buffer in buffers:
        other = others.get(cut.root.get_submodule(name))
        if other is not None:
            raise RuntimeError(
                f"{name} writes its buffer {buffer} and is in {other} too, on another stage: each would go on from its "
                "own values. Give each block a module of its own, or choose a partition with both in one stage."
            )


def written_buffers(cut: StageCut, run: ProbeRun, snapshot: Snapshot) -> set[str]:
    """Buffers outside all gated modules that this stage writes with true values.

    Raises:
        RuntimeError: If it reads one that, on this stage, is written with values that only another stage has.
    """
    written = set[str]()
    changed = {f"{n}.{b}" if n else b for n, m in cut.root.named_modules() for b in snapshot.changed_buffers(m)}
    for name, buffer in cut.loose_buffers():
        if name in changed:
            absent = run.provenance.of(buffer) & run.provenance.sources.absent
            if absent and name in run.read_buffers:
                sources = ", ".join(run.provenance.sources.names(absent))
                raise RuntimeError(
                    f"The buffer {name} is written with values of {sources}, which are not known on stage {run.stage}, "
                    f"where the buffer is read. {WAY_OUT}"
                )
            if not absent:
                written.add(name)
    return written


def warn_of_counters(cut: StageCut, snapshot: Snapshot) -> None:
    """Warn of attributes that the code before the blocks changes: every stage runs that code."""
    for name in sorted(cut.ancestors):
        for attribute, _ in snapshot.changed(cut.root.get_submodule(name)):
            path = f"{name}.{attribute}" if name else f"self.{attribute}"
            warnings.warn(
                f"{path} changes in a step before the last stage, in code that stages run for each micro-batch: it "
                "does not count batches. Use batch_idx or self.global_step, or change it in on_train_batch_start.",
                stacklevel=2,
            )


def refuse_hidden(cut: StageCut, run: ProbeRun, payload: Iterable[Tensor]) -> None:
    """Look in all Python lists and objects for values of a stage that its modules do not show.

    Lists that hooks close over and objects that blocks and the model share are found through the garbage collector.

    Raises:
        RuntimeError: Naming the kind of the holder.
    """
    if run.is_last:
        return
    # what modules hold themselves has been looked at
    known = {id(value) for module in cut.root.modules() for value in (vars(module), *vars(module).values())}
    sent = {id(tensor) for tensor in payload}
    alive = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    live = [tensor for tensor in alive if id(tensor) not in sent and run.provenance.of(tensor) & LIVE]
    known |= {id(alive), id(live)}
    held = {id(tensor) for tensor in live}
    for holder in gc.get_referrers(*live):  # one call for all: each walks through every object there is
        if id(holder) not in known and _is_users(holder, held):
            _refuse(cut, run, f"a {type(holder).__name__}")


def guard(cut: StageCut, recorded: Recorded) -> None:
    """Let attributes and buffers that blocks set on the way be read only by the stage that set them."""
    for name, attribute in set(recorded.attributes) - cut.guarded:
        cut.guarded.add((name, attribute))
        readable = partial(cut.is_readable, _stage_of(cut, name))
        guard_attribute(cut.root.get_submodule(name), name, attribute, readable)
    for name, buffer in recorded.buffers:
        cut.written_buffers[f"{name}.{buffer}"] = _stage_of(cut, name)


def _stage_of(cut: StageCut, name: str) -> int:
    return cut.stage_of_block(next(i for i, block in enumerate(cut.blocks) if f"{name}.".startswith(f"{block}.")))


def _is_users(holder: Any, held: set[int]) -> bool:
    """Whether a referrer is something that code of another stage could read: a container, a closure, an object."""
    if isinstance(holder, list | set | deque | CellType):
        return True
    if isinstance(holder, dict):  # keyword arguments that an activation checkpoint keeps are nobody's
        return "__builtins__" in holder or any(_names(other, holder) for other in gc.get_referrers(holder))
    if isinstance(holder, tuple | FrameType | nn.Module | Tensor):
        return False
    return any(id(value) in held for value in getattr(holder, "__dict__", {}).values()) and not _is_torchs(holder)


def _names(owner: Any, value: Any) -> bool:
    """Whether a Python module has the value as a global variable, or an ordinary object as an attribute."""
    if isinstance(owner, dict):
        return "__builtins__" in owner
    return any(attribute is value for attribute in getattr(owner, "__dict__", {}).values()) and not _is_torchs(owner)


def _is_torchs(holder: Any) -> bool:
    libraries = ("torch", "functools", "lightning_hybrid")
    return any(base.__module__.partition(".")[0] in libraries for base in type(holder).__mro__)


def _refuse(cut: StageCut, run: ProbeRun, holder: str) -> None:
    first, last = cut.blocks[run.blocks.start], cut.blocks[run.blocks.stop - 1]
    raise RuntimeError(
        f"{holder} keeps a value of stage {run.stage} (blocks {first} to {last}), and the code after {cut.blocks[-1]} "
        f"runs on another stage, where it is missing. {WAY_OUT}"
    )
