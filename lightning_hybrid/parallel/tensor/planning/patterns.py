"""Which modules a user's patterns name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase

from lightning_hybrid.parallel.tensor.assignment import STYLES
from lightning_hybrid.parallel.tensor.planning.outline import Outline, last, within

AUTO = "auto"


def check_style(pattern: str, style: str) -> None:
    """Refuse a style that does not exist.

    Raises:
        ValueError: With the nearest one that does.
    """
    if style not in (*STYLES, AUTO):
        near = get_close_matches(str(style), STYLES, n=1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"tensor_parallel_plan[{pattern!r}]={style!r} is not one of {', '.join(map(repr, STYLES))}, or {AUTO!r} "
            f"for what the automatic plan finds.{meant}"
        )


def match(outline: Outline, plan: Mapping[str, str]) -> dict[str, str]:
    """Style of each module that a pattern names.

    A pattern matches a module's whole dotted name or the end of it that starts behind a dot, and its `*` stands for
    anything, dots too: "embed" and "*.embed" both name `model.embed`. Of several patterns that match a module the last
    one counts. What lies in a replicated module is replicated, whatever names it. The style "auto" leaves a module to
    the automatic plan. A module without any parameters is passed over, unless it is to be replicated.

    Raises:
        ValueError: If a style does not exist, or a pattern matches no module with parameters.
    """
    found: dict[str, str] = {}
    for pattern, style in plan.items():
        check_style(pattern, style)
        matching = {first for name, first in outline.first_names.items() if _matches(name, pattern)}
        if style != "replicated":
            matching = {name for name in matching if next(outline.modules[name].parameters(), None) is not None}
        if not matching:
            raise ValueError(_no_match(outline, pattern))
        found |= dict.fromkeys(matching, style)
    whole = [name for name, style in found.items() if style == "replicated"]
    inside = {name for name in found for other in whole if name != other and within(name, other)}
    return {name: found[name] for name in outline.modules if name in found and name not in inside}


def _matches(name: str, pattern: str) -> bool:
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[start:]), pattern) for start in range(len(parts)))


def _no_match(outline: Outline, pattern: str) -> str:
    names = [name for name, module in outline.modules.items() if name and next(module.parameters(), None) is not None]
    near = _near(pattern, names) or _near(last(pattern), _unique(map(last, names)))
    meant = (
        f"Near it: {', '.join(near)}." if near else f"Some of its modules: {', '.join(_unique(map(last, names))[:8])}."
    )
    return f"tensor_parallel_plan has the pattern {pattern!r}, which matches no module with parameters. {meant}"


def _near(pattern: str, names: list[str]) -> list[str]:
    return get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.6)


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
