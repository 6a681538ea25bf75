"""Finds the repeated blocks of a model: what the pipeline cuts between."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

CONTAINERS = (nn.ModuleList, nn.Sequential)
DOMINANT = 0.8  # an element with more than this share of a list's parameters hides the real list inside it
LISTED = 8  # lists that an error names, the longest first
SIBLING = 0.1  # a second list counts when it has at least this share of the largest one's parameters


def find_block_lists(
    root: nn.Module, pipeline_layers: str | Sequence[str] | None = None, argument: str = "pipeline_layers"
) -> list[str]:
    """Dotted names of the lists whose elements are the blocks, in the order in which the model registers them.

    Args:
        root: The whole model.
        pipeline_layers: The user's choice; None finds the `ModuleList` or `Sequential` with most parameters, and others
            beside it with at least a tenth as many (an encoder and a decoder).
        argument: What the user knows that choice by, for errors.

    Raises:
        ValueError: If a name does not exist or names no list. An empty result means that the model has no such list.
    """
    if pipeline_layers is not None:
        names = [pipeline_layers] if isinstance(pipeline_layers, str) else list(pipeline_layers)
        for name in names:
            _check_list(root, name, argument)
        for index, name in enumerate(names):
            if any(_nested(name, other) for other in names[:index]):
                raise ValueError(f"{argument}={names} names a list twice, or one that lies inside another.")
        return names
    sizes = {
        name: num_parameters(module)
        for name, module in root.named_modules()
        if isinstance(module, CONTAINERS) and sum(num_parameters(child) > 0 for child in module.children()) >= 2
    }
    if not sizes:
        return []
    largest = _descend(root, max(sizes, key=lambda name: sizes[name]), sizes)
    chosen = [largest]
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if sizes[name] >= SIBLING * sizes[largest] and not any(_nested(name, other) for other in chosen):
            chosen.append(name)
    return [name for name in sizes if name in chosen]


def block_names(root: nn.Module, lists: Sequence[str], *, shared: bool = False) -> list[str]:
    """Dotted names of all blocks, in order.

    Args:
        root: The whole model.
        lists: Names of the lists whose elements they are.
        shared: Whether a module may stand at several positions of a list; it is named once.

    Raises:
        ValueError: If one module stands at two positions, where it may not.
    """
    names = []
    for list_name in lists:
        container = root.get_submodule(list_name)
        children = [name for name, _ in container.named_children()]  # names a shared module once
        if not shared and len(children) != len(container):  # type: ignore[arg-type]
            raise ValueError(
                f"{list_name} holds one module at several positions; the pipeline needs one module for each."
            )
        names += [block for child in children for block in _callable_blocks(container, child, list_name)]
    return names


def _callable_blocks(container: nn.Module, child_name: str, prefix: str) -> list[str]:
    """The block itself; a list or dictionary of modules is not called, but its elements are."""
    name = f"{prefix}.{child_name}" if prefix else child_name
    child = container.get_submodule(child_name)
    if not isinstance(child, nn.ModuleList | nn.ModuleDict):
        return [name]
    return [block for inner, _ in child.named_children() for block in _callable_blocks(child, inner, name)]


def num_parameters(module: nn.Module) -> int:
    """Number of scalars in the module's parameters, shared ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


def _check_list(root: nn.Module, name: str, argument: str) -> None:
    try:
        module = root.get_submodule(name)
    except AttributeError as error:
        known = [n for n, m in root.named_modules() if isinstance(m, CONTAINERS)]
        known.sort(key=lambda other: -len(root.get_submodule(other)))  # type: ignore[arg-type]
        more = f" and {len(known) - LISTED} shorter ones" if len(known) > LISTED else ""
        raise ValueError(
            f"{argument}={name!r} does not exist in the model. Its lists are {known[:LISTED]}{more}."
        ) from error
    if not isinstance(module, CONTAINERS):
        raise ValueError(
            f"{argument}={name!r} is a {type(module).__name__}; it must name an nn.ModuleList or nn.Sequential."
        )


def _descend(root: nn.Module, name: str, sizes: dict[str, int]) -> str:
    while True:
        inner = [
            other
            for child_name, child in root.get_submodule(name).named_children()
            if num_parameters(child) > DOMINANT * sizes[name]
            for other in sizes
            if f"{other}.".startswith(f"{name}.{child_name}." if name else f"{child_name}.")
        ]
        if not inner:
            return name
        name = max(inner, key=lambda other: sizes[other])


def _nested(a: str, b: str) -> bool:
    """Whether one name lies inside the other; the root, named "", holds everything."""
    return not a or not b or f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")
