"""Parameters that several modules hold, as a tied embedding and head: one tensor is split in one way."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from lightning_hybrid.functional.splits import Split
from lightning_hybrid.parallel.tensor.assignment import Assignment
from lightning_hybrid.parallel.tensor.planning.outline import Outline
from lightning_hybrid.parallel.tensor.planning.styles import assign


def follow(outline: Outline, assignments: dict[str, Assignment]) -> dict[str, Assignment]:
    """Add what follows from sharing: the other holder of a split parameter is split likewise.

    Raises:
        ValueError: If two styles would split one parameter in two ways.
    """
    found, waiting = dict(assignments), list(assignments.values())
    holders = _holders(outline)
    while waiting:
        first = waiting.pop()
        module = outline.modules[first.module]
        for parameter, split in first.splits.items():
            for name, own in holders.get(id(module.get_parameter(parameter)), []):
                if f"{name}.{own}" != f"{first.module}.{parameter}":
                    added = _other(outline, first, split, found.get(name), (name, own))
                    waiting += added
                    found |= {each.module: each for each in added}
    return found


def _holders(outline: Outline) -> dict[int, list[tuple[str, str]]]:
    """Modules and names under which each parameter is held."""
    found: dict[int, list[tuple[str, str]]] = {}
    for name, module in outline.modules.items():
        for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(id(parameter), []).append((name, own))
    return {key: places for key, places in found.items() if len(places) > 1}


def _other(
    outline: Outline, first: Assignment, split: Split, present: Assignment | None, place: tuple[str, str]
) -> list[Assignment]:
    """The assignment of another holder of a split parameter, if it is to be added."""
    name, own = place
    if present is not None:
        if present.splits.get(own) != split:
            raise _conflict(first, name, present.style)
        return []
    for style in _candidates(outline, first, name):
        try:
            added = assign(outline, name, style)
        except ValueError:
            continue
        if added.splits.get(own) == split:
            return [added]
    if isinstance(outline.modules[name], nn.Embedding) or outline.matrix(name):
        raise _conflict(first, name, "")
    return []  # a parameter that is read on its own, as BERT's bias of the predictions


def _candidates(outline: Outline, first: Assignment, name: str) -> Iterator[str]:
    if type(outline.modules[name]) is type(outline.modules[first.module]):
        yield first.style
    yield "vocab"


def _conflict(first: Assignment, name: str, style: str) -> ValueError:
    other = f"is given {style!r}" if style else "cannot be split so"
    return ValueError(
        f"{first.module} and {name} share one parameter, but the first has the style {first.style!r} in "
        f"tensor_parallel_plan and the second {other}. Give both 'vocab', or split neither."
    )
