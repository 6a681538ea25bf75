"""Gates: the pipeline's hold on a module that nobody rewrote.

A module gets a subclass of its own class that overrides `__call__`, and nothing else about it changes: its name, its
attributes, `isinstance`, its hooks, its `state_dict` keys. The gate is outermost, around hooks, FSDP and
`Module.compile`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_hybrid.compat import storage_key
from lightning_hybrid.functional.trees import map_leaves

GATE = "_lightning_hybrid_gate"


class Run(Protocol):
    """What a gate asks about a call."""

    stage: int
    is_probe: bool

    @property
    def entered(self) -> bool:
        """Whether what the step now computes belongs to this stage."""

    def observe(self, value: object, reader: str) -> None:
        """Say that a value matters."""

    def call(self, gate: Gate, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer the call of a gated module."""


class Gate:
    """One gated module.

    Attributes:
        position: Position among the blocks, or None for a module outside them.
        owned: Its parameters are here.
        random: Its call draws random numbers (known after a probe).
    """

    def __init__(self, keeper: GateKeeper, name: str, position: int | None, *, owned: bool) -> None:
        self.keeper, self.name, self.position, self.owned = keeper, name, position, owned
        self.random = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Gate:
        return self  # a copy of the module (an average of weights, say) answers to the same pipeline

    def call(self, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call: during a step the run decides; outside it, or in recompute, only what is here can run."""
        if self.keeper.active is not None:
            return self.keeper.active.call(self, proceed, args, kwargs)
        if not self.owned:
            raise RuntimeError(
                f"{self.name} was called outside a step, or by an activation checkpoint that spans a stage boundary, "
                "and lives on another pipeline stage. Call the model only inside training_step, validation_step, "
                "test_step and predict_step, and checkpoint each block on its own."
            )
        args, kwargs = self.keeper.revive((args, kwargs))
        return self.keeper.draw(proceed, args, kwargs) if self.random else proceed(*args, **kwargs)


class GateKeeper:
    """Shared by all gates of a model: the run that is under way, and the random streams of modules.

    Attributes:
        active: The run that answers calls, or None.
        device: Where the model lives; its generator is managed beside the CPU's.
        filled: Memory that runs under way have filled, by `storage_key`: the storage, kept so that its address is not
            reused, and whether its values need a gradient.
    """

    def __init__(self, device: torch.device) -> None:
        self.active: Run | None = None
        self.device = device
        self.filled: dict[int, tuple[torch.UntypedStorage, bool]] = {}

    def revive(self, arguments: tuple[Any, Any]) -> tuple[Any, Any]:
        """Arguments of a recomputed block: those saved before they were filled do not know of their gradient."""
        if not self.filled:
            return arguments
        revived: tuple[Any, Any] = map_leaves(self._revive, arguments)
        return revived

    def _revive(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.requires_grad or storage_key(leaf) not in self.filled:
            return leaf
        _, needs_gradient = self.filled[storage_key(leaf)]
        return leaf.detach().requires_grad_(needs_gradient)

    def draw(self, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module on a random stream of its own, seeded by one number drawn from the step's stream.

        The step's stream then moves on by one number for each such module, whether it runs here or on another stage, so
        that what the step draws outside of modules is the same on every stage; and an activation checkpoint, which
        restores the step's stream, repeats the module's numbers.
        """
        seed = self.draw_seed()
        with fork_random_streams(self.device):
            seed_random_streams(seed, self.device)
            return proceed(*args, **kwargs)

    @staticmethod
    def draw_seed() -> int:
        """One number of the step's stream."""
        return int(torch.randint(2**62, ()).item())


def fork_random_streams(device: torch.device) -> AbstractContextManager[None]:
    """Restore torch's random streams, the CPU's and the device's, at the end of the context."""
    if device.type == "cpu":
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device.index or 0], device_type=device.type)


def seed_random_streams(seed: int, device: torch.device) -> None:
    """Start torch's streams, the CPU's and the device's.

    `torch.manual_seed` also formats a call stack for each kind of device that is not there, up to a millisecond a call.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def add_gate(module: nn.Module, gate: Gate) -> None:
    """Put a gate around every call of `module`."""
    module.__dict__[GATE] = gate
    module.__class__ = _gated(type(module))


def remove_gate(module: nn.Module) -> None:
    """Take the gate away that was put on last."""
    del module.__dict__[GATE]
    module.__class__ = type(module).__bases__[0]


def _gated(base: type[nn.Module]) -> type[nn.Module]:
    """The gated subclass of a class, one for all its modules: torch.compile makes code for each class of `self`."""
    for derived in base.__subclasses__():
        if GATE in vars(derived):
            return derived

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        proceed = base.__call__.__get__(self)
        return getattr(self, GATE).call(proceed, args, kwargs)

    return _subclass(base, {"__call__": call, GATE: None})


def guard_attribute(module: nn.Module, name: str, attribute: str, readable: Callable[[], bool]) -> None:
    """Make an attribute that a block sets while it runs unreadable where it is not the running micro-batch's.

    Args:
        module: The block or a module in it.
        name: Its dotted name.
        attribute: The attribute.
        readable: Asked at each read.
    """

    def read(self: nn.Module) -> Any:
        if not readable():
            raise RuntimeError(
                f"{name}.{attribute} is set while {name} runs, on another pipeline stage, and is not known where it is "
                "read. Values recorded on the side do not cross stages: pass them through the blocks, or add a loss "
                "made inside a block with lightning_hybrid.add_auxiliary_loss(x, loss)."
            )
        if attribute in self.__dict__:
            return self.__dict__[attribute]
        return getattr(super(guarded, self), attribute)  # a default of the class, or its AttributeError

    def write(self: nn.Module, value: object) -> None:
        self.__dict__[attribute] = value

    def delete(self: nn.Module) -> None:
        del self.__dict__[attribute]

    guarded = _subclass(type(module), {attribute: property(read, write, delete)})
    module.__class__ = guarded


def _subclass(base: type[nn.Module], members: dict[str, Any]) -> type[nn.Module]:
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), {**names, **members})


def hollow(module: nn.Module, parameter_name: str, device: torch.device) -> Tensor:
    """Replace one of the module's own parameters by a stand-in of the same shape without memory, and return that.

    The stand-in is no parameter: it is in no `parameters()`, `state_dict()` or optimizer, and a probe refuses to let
    its value matter.
    """
    parameter = module.get_parameter(parameter_name)
    stand_in = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
    delattr(module, parameter_name)
    module.__dict__[parameter_name] = stand_in
    return stand_in
