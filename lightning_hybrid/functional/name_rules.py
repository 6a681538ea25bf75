"""Rules about parameters, by patterns of names and types of modules: which of them a parameter falls under."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn


@dataclass
class Place:
    """Where in a module a parameter is.

    Attributes:
        names: Its dotted names; a tied parameter has several.
        kinds: Classes of the modules it is in, below the outermost, with those they derive from, but `nn.Module`.
    """

    names: list[str] = field(default_factory=list)
    kinds: set[type] = field(default_factory=set)


def places(module: nn.Module) -> dict[int, Place]:
    """The place of each parameter of a module, by its `id`."""
    found: dict[int, Place] = {}
    modules = dict(module.named_modules(remove_duplicate=False))
    for name, parameter in module.named_parameters(remove_duplicate=False):
        place = found.setdefault(id(parameter), Place())
        place.names.append(name)
        for owner in _owners(name):
            place.kinds |= {kind for kind in type(modules[owner]).__mro__ if _is_kind(kind)}
    return found


def first_match(rules: Iterable[str | type[nn.Module]], place: Place) -> int | None:
    """Number of the first rule that a parameter falls under.

    Args:
        rules: In order. A type stands for parameters in modules of it. A string is a pattern as of `fnmatch`, upper and
            lower case apart, and stands for parameters with a run of components of one of their names, or a class of a
            module that they are in, that matches it. Components that begin with an underscore, such as wrappers add,
            may be left out.
        place: Where the parameter is.

    Returns:
        The number, from 0; None if there is none.
    """
    names = {*place.names, *map(public_name, place.names)}
    texts = {run for name in names for run in _runs(name)} | {kind.__name__ for kind in place.kinds}
    for number, rule in enumerate(rules):
        if any(fnmatchcase(text, rule) for text in texts) if isinstance(rule, str) else rule in place.kinds:
            return number
    return None


def public_name(name: str) -> str:
    """A dotted name without the components that begin with an underscore: the same with wrappers and without."""
    return ".".join(component for component in name.split(".") if not component.startswith("_"))


def _runs(name: str) -> Iterator[str]:
    """Runs of one or more components that follow each other."""
    components = name.split(".")
    for start in range(len(components)):
        for stop in range(start + 1, len(components) + 1):
            yield ".".join(components[start:stop])


def _owners(name: str) -> Iterator[str]:
    """Names of the modules that a parameter is in, but the outermost."""
    components = name.split(".")[:-1]
    return (".".join(components[:stop]) for stop in range(1, len(components) + 1))


def _is_kind(kind: type) -> bool:
    return issubclass(kind, nn.Module) and kind is not nn.Module
