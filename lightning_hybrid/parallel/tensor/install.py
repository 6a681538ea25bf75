"""Puts tensor parallelism on the modules of a model: what parameters they show, and where the sequence is dealt out.

Modules keep their names, attributes, hooks and `state_dict` keys; their class becomes a subclass of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torchmetrics import Metric

from lightning_hybrid.compat import own_parameters
from lightning_hybrid.functional.splits import Split
from lightning_hybrid.functional.trees import map_leaves
from lightning_hybrid.parallel.tensor import (
    alongside,
    attention,
    attributes,
    elementwise,
    layers,
    products,
    shapes,
    vocabulary,
)
from lightning_hybrid.parallel.tensor.assignment import Assignment
from lightning_hybrid.parallel.tensor.axis import TensorAxis
from lightning_hybrid.parallel.tensor.parallel import TensorParallel
from lightning_hybrid.parallel.tensor.regions import add_region, make_whole
from lightning_hybrid.parallel.tensor.split_tensor import whole, wrap

SHOWN = "_lightning_hybrid_shown"
RULES = (alongside, attention, attributes, elementwise, layers, products, shapes, vocabulary)
"""Modules whose functions have registered themselves as rules."""


def install(
    root: nn.Module,
    runs: Sequence[Sequence[str]],
    tensor: TensorParallel,
    assignments: Sequence[Assignment],
    *,
    sequence_parallel: bool | str,
) -> None:
    """Let modules compute with their slices.

    Args:
        root: The model, with its parameters already cut to slices.
        runs: Names of blocks that follow each other on one stage: the sequence is dealt out from the first to the last.
        tensor: The slices.
        assignments: The plan they come from.
        sequence_parallel: Whether the sequence is dealt out between the matrices; "regather" keeps shards only.
    """
    axis = tensor.axis
    axis.regather = sequence_parallel == "regather"
    _show_parameters(root, tensor, [*tensor.splits, *(tensor.deferred if sequence_parallel else ())])
    for module in root.modules():
        if isinstance(module, Metric):
            vars(module)["update"] = _of_wholes(module.update)
    for name in [a.module for a in assignments if a.style == "replicated"]:
        make_whole(root.get_submodule(name), axis)
    for run in runs if sequence_parallel else ():
        for name in run:
            add_region(root.get_submodule(name), axis, is_last=name == run[-1])


def _show_parameters(root: nn.Module, tensor: TensorParallel, names: Sequence[str]) -> None:
    shown: dict[str, dict[str, Split | None]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        shown.setdefault(parent, {})[leaf] = tensor.splits.get(name)
    # a shared module has several names
    modules = {id(root.get_submodule(parent)): parameters for parent, parameters in shown.items()}
    for module in list(root.modules()):
        if id(module) in modules:
            _show(module, modules[id(module)], tensor.axis)


def _of_wholes(update: Callable[..., Any]) -> Callable[..., Any]:
    """A metric keeps what it is given, and gathers it over replicas by its address: no parts."""

    @wraps(update)
    def updated(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_leaves(whole, (args, kwargs))
        return update(*args, **kwargs)

    return updated


def _show(module: nn.Module, parameters: dict[str, Split | None], axis: TensorAxis) -> None:
    module.__dict__[SHOWN] = parameters, axis
    kind: Any = type(module)
    module.__class__ = _showing(kind, tuple(sorted(parameters)))


@cache
def _showing(base: Any, names: tuple[str, ...]) -> type[nn.Module]:
    members: dict[str, Any] = {name: _shown_parameter(name) for name in names}
    if base.__name__ == "Conv1D" and "weight" in names:
        members["forward"] = _forward_of_conv1d
    about = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), {**about, **members})


def _shown_parameter(name: str) -> property:
    """The parameter itself, or in a step what stands for the whole of it."""

    def read(self: nn.Module) -> Any:
        value = own_parameters(self).get(name)
        if value is None:
            value = self.__dict__.get(name)  # a stand-in of a parameter that another stage has
        if value is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")
        parameters, axis = self.__dict__[SHOWN]
        if not axis.active or isinstance(value, DTensor):  # `fully_shard` looks at what it has sharded, in a step too
            return value
        shown = wrap(value, parameters[name], axis)
        shown.parameter = value
        return shown

    def write(self: nn.Module, value: object) -> None:
        self.__dict__[name] = value

    def delete(self: nn.Module) -> None:
        del self.__dict__[name]

    return property(read, write, delete)


def _forward_of_conv1d(self: Any, x: Tensor) -> Any:
    """As transformers' Conv1D, a linear layer with its weight transposed, which flattens positions on the way."""
    return F.linear(x, self.weight.t(), self.bias)
