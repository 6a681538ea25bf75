"""Bytes of parameters, gradients, optimizer states and saved activations on this rank, by module.

Torch's `MemTracker` was considered: it is private, and a dispatch mode, which switches compilation off.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_hybrid.functional.timeline import ELSEWHERE, Timeline
from lightning_hybrid.functional.trees import leaves_of
from lightning_hybrid.parallel.ledgers.fates import Fate, Release, observers
from lightning_hybrid.parallel.ledgers.fixed import FixedStorages, local_part
from lightning_hybrid.parallel.ledgers.live import Counted, LiveBytes, bytes_of, key_of
from lightning_hybrid.parallel.ledgers.recording import Recorder
from lightning_hybrid.parallel.ledgers.saved import SavedTensors

FOLLOWED = ("gradients", "activations", *ELSEWHERE)
"""What comes and goes within a step."""


@dataclass
class Memory:
    """Bytes by module name; each category at the moment of a step when it was largest.

    Attributes:
        trainable: Parameters that require a gradient.
        frozen: The other parameters.
        gradients: Gradients of parameters.
        states: Optimizer states, under the module of their parameter; "" for those of no parameter here.
        activations: Storages that autograd holds for the backward pass and that are no parameters or buffers, under
            the module that saved them first; "" for what the step does outside modules.
        recomputed: Storages that it would hold too if they were not dropped until they are made again.
        offloaded: Storages that lie in host memory meanwhile.
        compressed: Storages that lie encoded meanwhile, by their own bytes; those of the encoding are activations.
    """

    trainable: dict[str, int] = field(default_factory=dict)
    frozen: dict[str, int] = field(default_factory=dict)
    gradients: dict[str, int] = field(default_factory=dict)
    states: dict[str, int] = field(default_factory=dict)
    activations: dict[str, int] = field(default_factory=dict)
    recomputed: dict[str, int] = field(default_factory=dict)
    offloaded: dict[str, int] = field(default_factory=dict)
    compressed: dict[str, int] = field(default_factory=dict)

    def totals(self) -> dict[str, int]:
        """Sum over modules of each category."""
        return {name: sum(of_module.values()) for name, of_module in vars(self).items()}

    def largest(self, other: Memory) -> Memory:
        """Of each category the larger one."""
        mine, theirs = self.totals(), other.totals()
        return Memory(**{n: getattr(other if theirs[n] > mine[n] else self, n) for n in mine})


class MemoryMeter:
    """Measures one step after the other of a module: `start`, the step within `with`, then `finish`.

    Args:
        root: The module.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._live = {name: LiveBytes(outlive=name in ELSEWHERE) for name in FOLLOWED}
        self._fixed = FixedStorages(root, self._met)
        self._hooks = WeakTensorKeyDictionary()  # parameter -> its hook
        self._saved = ExitStack()
        self._recorder: Recorder | None = None

    def start(self, recorded: int | None = None) -> None:
        """A new step; `recorded`: its number, if it is to be written down."""
        self._fixed.start()
        self.note_gradients()
        for live in self._live.values():
            live.start()
        self._recorder = None if recorded is None else Recorder(recorded, self._live)

    @property
    def timeline(self) -> Timeline | None:
        """What has been written down of the last step."""
        return None if self._recorder is None else self._recorder.timeline

    def __enter__(self) -> MemoryMeter:
        observers.append(self)
        self._saved.callback(observers.remove, self)
        self._saved.enter_context(SavedTensors(self))
        return self

    def __exit__(self, *exception: object) -> None:
        self._saved.close()

    def close(self) -> None:
        """Take all hooks away."""
        self._saved.close()
        if self._recorder is not None:
            self._recorder.stop()
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    def optimizer_steps(self) -> None:
        """An optimizer is about to step."""
        if self._recorder is not None:
            self._recorder.phase("step")
        self.note_gradients()

    def note_gradients(self) -> None:
        """Count the gradients that are there, also those that no backward pass of ours has accumulated."""
        for name, parameter in self._root.named_parameters():
            if parameter.grad is not None:
                self._add_gradient(name.rpartition(".")[0], parameter.grad)

    def finish(self, optimizers: Iterable[Optimizer]) -> Memory:
        """What the step that has ended took."""
        self.note_gradients()
        if self._recorder is not None:
            self._recorder.stop(ended=True)
        trainable, frozen = parameter_bytes(self._root)
        states = optimizer_bytes(self._root, optimizers)
        followed = {name: live.at_peak for name, live in self._live.items()}
        return Memory(trainable=trainable, frozen=frozen, states=states, **followed)

    def announced(self, tensor: Tensor, fate: Fate, earlier: Release | None = None) -> Counted:
        """See `fates.FateObserver`."""
        if self._fixed.is_fixed(tensor):
            return Counted("")
        owner, part = self._owner(earlier), local_part(tensor)
        if fate == "recomputed":
            if any(self._live[name].holds(part) for name in ("activations", "offloaded", "compressed")):
                return Counted(owner)
        else:
            self._live["recomputed"].discard(part)  # such as a block's result, which is the next one's input
        if fate == "kept":
            self._live["compressed"].discard(part)  # somebody needs it as it is
        return self._add("activations" if fate == "kept" else fate, part, owner, whole=True)

    def _owner(self, earlier: Release | None) -> str:
        if isinstance(earlier, Counted):
            return earlier.owner
        running = self._fixed.running.now()
        return self._fixed.running.names[id(running[0])] if running else ""

    def _met(self, module: nn.Module, tensor: Tensor) -> None:
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad and tensor not in self._hooks:
            hook = partial(self._accumulated, self._fixed.running.names.get(id(module), ""))
            self._hooks[tensor] = tensor.register_post_accumulate_grad_hook(hook)

    def _accumulated(self, owner: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._add_gradient(owner, parameter.grad)

    def _add_gradient(self, owner: str, gradient: Tensor) -> None:
        if local_part(gradient).layout == torch.strided:
            self._add("gradients", local_part(gradient), owner)

    def _add(self, kind: str, tensor: Tensor, owner: str, *, whole: bool = False) -> Counted:
        if self._recorder is not None:
            self._recorder.before_adding()
        return self._live[kind].add(tensor, owner, whole=whole)


def parameter_bytes(root: nn.Module) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of trainable and of frozen parameters on this rank by module; shared ones once, under their first name."""
    sums: tuple[dict[str, int], dict[str, int]] = {}, {}
    seen = set[tuple[int, int]]()
    for name, parameter in root.named_parameters():
        of_kind = sums[0 if parameter.requires_grad else 1]
        _add(of_kind, name.rpartition(".")[0], parameter, seen)
    return sums


def optimizer_bytes(root: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, int]:
    """Bytes of all tensors in optimizer states on this rank, under the module of their parameter."""
    owners = {id(parameter): name.rpartition(".")[0] for name, parameter in root.named_parameters()}
    sums: dict[str, int] = {}
    seen = set[tuple[int, int]]()
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for tensor in leaves_of(state):
                if isinstance(tensor, Tensor):
                    _add(sums, owners.get(id(parameter), ""), tensor, seen)
    return sums


def _add(sums: dict[str, int], owner: str, tensor: Tensor, seen: set[tuple[int, int]]) -> None:
    tensor = local_part(tensor)
    key = key_of(tensor)
    if key not in seen:
        seen.add(key)
        sums[owner] = sums.get(owner, 0) + bytes_of(tensor)
