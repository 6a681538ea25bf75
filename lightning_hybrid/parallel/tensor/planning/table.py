"""A tensor plan as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_hybrid.parallel.tensor.assignment import Assignment
from lightning_hybrid.parallel.tensor.planning.outline import own_parameters, within


@dataclass(frozen=True)
class _Row:
    """One line; `what` is everything but the name."""

    parts: tuple[str, ...]
    what: tuple[str, str]


def plan_table(root: nn.Module, assignments: Sequence[Assignment], size: int, *, pipeline: int = 1) -> str:
    """The plan for people: a line for each module, equal blocks in one, and bytes in total.

    Args:
        root: The whole model, before it is split.
        assignments: The plan.
        size: Ranks on the tensor axis.
        pipeline: Ranks on the pipeline axis, which share what the totals count.
    """
    rows = [_Row(tuple(name.split(".")), what) for name, what in _lines(root, assignments, size)]
    for position in reversed(range(max((len(row.parts) for row in rows), default=0))):
        rows = _collapsed(rows, position)
    cells = [("module", "style", "shape on a rank"), *((".".join(row.parts) or "(model)", *row.what) for row in rows)]
    first, second = (max(len(cell[column]) for cell in cells) for column in (0, 1))
    lines = [f"{a:<{first}}  {b:<{second}}  {c}".rstrip() for a, b, c in cells]
    lines += _totals(root, assignments, size)
    if pipeline > 1:
        lines.append(f"these are totals of the whole model, whose stages are on {pipeline} pipeline ranks")
    return "\n".join(lines)


def _lines(root: nn.Module, assignments: Sequence[Assignment], size: int) -> Iterator[tuple[str, tuple[str, str]]]:
    """Modules of the plan and matrices outside it, in registration order."""
    planned = {assignment.module: assignment for assignment in assignments}
    covered = [name for name, given in planned.items() if given.style in {"replicated", "heads"}]
    for name, module in root.named_modules():
        given = planned.get(name)
        if given is not None:
            yield name, (given.style, _description(module, given, size))
        elif not any(within(name, other) for other in covered):
            shapes = {n: p.shape for n, p in module.named_parameters(recurse=False) if p.ndim > 1}
            if shapes:
                text = ", ".join(f"{n} {_times(shape)}" for n, shape in shapes.items())
                yield name, ("whole", f"{text}: no rule or pattern covers it")


def _description(module: nn.Module, given: Assignment, size: int) -> str:
    parts = []
    for name, split in given.splits.items():
        shape = module.get_parameter(name).shape
        in_parts = f" in {len(split.sections)} sections" if len(split.sections) > 1 else ""
        parts.append(f"{name} {_times(split.local_shape(shape, size, 0))} of {_times(shape)}{in_parts}")
    parts += [f"{name} whole, summed late" for name in given.deferred]
    if not parts:
        parts = [f"{name} whole" for name in own_parameters(module)] or ["whole"]
    return ", ".join(parts) + (f": {given.note}" if given.note else "")


def _times(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _collapsed(rows: Sequence[_Row], position: int) -> list[_Row]:
    """Rows that differ in one number of their names only, as one."""
    groups: dict[object, list[_Row]] = {}
    for index, row in enumerate(rows):
        numbered = len(row.parts) > position and row.parts[position].isdigit()
        masked = (*row.parts[:position], None, *row.parts[position + 1 :])
        groups.setdefault((masked, row.what) if numbered else index, []).append(row)
    return [_merged(group, position) for group in groups.values()]


def _merged(group: Sequence[_Row], position: int) -> _Row:
    if len(group) == 1:
        return group[0]
    numbers = sorted(int(row.parts[position]) for row in group)
    run = numbers == list(range(numbers[0], numbers[-1] + 1))
    text = f"{{{numbers[0]}..{numbers[-1]}}}" if run else "{" + ",".join(map(str, numbers)) + "}"
    parts = group[0].parts
    return _Row((*parts[:position], text, *parts[position + 1 :]), group[0].what)


def _totals(root: nn.Module, assignments: Sequence[Assignment], size: int) -> list[str]:
    modules = {given.module: root.get_submodule(given.module) for given in assignments}
    splits = {id(modules[a.module].get_parameter(n)): split for a in assignments for n, split in a.splits.items()}
    split = of = whole = 0
    for parameter in root.parameters():
        found, width = splits.get(id(parameter)), parameter.element_size()
        if found is None:
            whole += parameter.numel() * width
            continue
        local = parameter.numel() // found.length * sum(found.shares(size, 0))
        split, of = split + local * width, of + parameter.numel() * width
    return [
        f"split over {size} ranks: {_readable(split)} a rank of {_readable(of)}",
        f"replicated: {_readable(whole)} on every rank",
    ]


def _readable(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{round(size, 1):g} {unit}"
        size /= 1024
    return f"{round(size, 1):g} GiB"
