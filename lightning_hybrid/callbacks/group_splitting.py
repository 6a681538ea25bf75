"""Groups of an optimizer split into smaller ones, with the schedulers that were made before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lightning.fabric.utilities.types import Optimizable
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

BY_GROUP = ("base_lrs", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")
"""Lists of torch's schedulers with an entry for each group, beside that of the last rates."""


def optimizers_and_schedulers(configured: Any) -> tuple[list[Optimizer], list[Any]]:
    """All that is in what `configure_optimizers` returned, in any form."""
    if isinstance(configured, LightningOptimizer):
        return [configured.optimizer], []
    if isinstance(configured, Optimizable):
        return [configured], []  # type: ignore[list-item]
    if isinstance(configured, Mapping | list | tuple):
        parts = configured.values() if isinstance(configured, Mapping) else configured
        found = [optimizers_and_schedulers(part) for part in parts]
        return [one for some, _ in found for one in some], [one for _, some in found for one in some]
    return [], [configured] if hasattr(configured, "optimizer") else []


def split_groups(
    optimizer: Optimizer, multipliers: Mapping[int, float], order: Sequence[float], schedulers: Iterable[Any]
) -> None:
    """Split each group of an optimizer, in place, into groups of one multiplier, and multiply their weight decays.

    Args:
        optimizer: The optimizer. A group that need not be split stays the same dictionary.
        multipliers: Of each of its parameters, by `id`.
        order: All multipliers once, in the order of the groups that they make.
        schedulers: Those made before, of which others' are left alone.

    Raises:
        ValueError: If a group has no weight decay, if the optimizer works on groups of its own, or if nobody knows what
            a scheduler keeps for each group; then nothing has been changed.
    """
    _check_optimizer(optimizer)
    parts: list[dict[str, Any]] = []
    sources: list[int] = []
    for index, group in enumerate(optimizer.param_groups):
        members = [multipliers[id(parameter)] for parameter in group["params"]]
        present = [multiplier for multiplier in order if multiplier in members] or [1.0]
        sources += [index] * len(present)
        parts += [
            group if len(present) == 1 else _part(group, [member == multiplier for member in members])
            for multiplier in present
        ]
    old = len(optimizer.param_groups)
    if len(parts) > old:
        attached = list(_all_schedulers(s for s in schedulers if _bare(s.optimizer) is optimizer))
        for scheduler in attached:
            _check_scheduler(scheduler, old)
        for scheduler in attached:
            _widen(scheduler, sources, old)
    optimizer.param_groups[:] = parts
    for group in (group for group in parts if group["params"]):
        multiplier = multipliers[id(group["params"][0])]
        if multiplier != 1:
            group.update({name: group[name] * multiplier for name in weight_decays(group)})


def weight_decays(group: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a group that are weight decays: `weight_decay`, and those whose names end so, but are no switches."""
    named = {name: value for name, value in group.items() if name == "weight_decay" or name.endswith("_weight_decay")}
    return {name: value for name, value in named.items() if value is not None and not isinstance(value, bool)}


def _check_optimizer(optimizer: Optimizer) -> None:
    kind = type(optimizer)
    for index, group in enumerate(optimizer.param_groups):
        if not weight_decays(group):
            raise ValueError(
                f"Group {index} of {kind.__name__} has no option weight_decay for WeightDecayRules to multiply, but "
                f"{', '.join(sorted(group.keys() - {'params'}))}. Choose an optimizer that has one, such as AdamW, or "
                "leave WeightDecayRules out."
            )
    for name, inner in vars(optimizer).items():
        others = isinstance(inner, Optimizer) and inner.param_groups is not optimizer.param_groups
        if others and kind.__module__.partition(".")[0] != "lightning_hybrid":
            raise ValueError(
                f"{kind.__name__}.{name} is a {type(inner).__name__} with groups of its own, which WeightDecayRules "
                f"cannot split alike. Give WeightDecayRules(...).apply the {type(inner).__name__} before "
                f"{kind.__name__} is made from it, or make the groups by hand."
            )


def _part(group: Mapping[str, Any], chosen: Sequence[bool]) -> dict[str, Any]:
    """A group of the chosen parameters, with the same options."""
    part = {name: _copy(value) for name, value in group.items() if name != "params"}
    for name in ("params", "param_names"):
        if name in group:
            part[name] = [value for value, is_chosen in zip(group[name], chosen, strict=True) if is_chosen]
    return part


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value  # schedulers write rates that are tensors in place


def _bare(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _all_schedulers(schedulers: Iterable[Any]) -> Iterator[Any]:
    """Each scheduler once, and those that it steps."""
    waiting, seen = list(schedulers), set[int]()
    while waiting:
        scheduler = waiting.pop()
        if id(scheduler) in seen:
            continue
        seen.add(id(scheduler))
        yield scheduler
        for value in _attributes(scheduler).values():
            waiting += _held(value)


def _held(value: Any) -> list[Any]:
    """Schedulers in an attribute of another."""
    values = value if isinstance(value, list | tuple) else [value]
    return [one for one in values if isinstance(one, LRScheduler)]


def _attributes(scheduler: Any) -> dict[str, Any]:
    return getattr(scheduler, "__dict__", {})


def _last_rates(scheduler: Any) -> Any:
    """The list itself, of which torch gives no copy."""
    return scheduler.get_last_lr() if isinstance(scheduler, LRScheduler) else None


def _check_scheduler(scheduler: Any, number: int) -> None:
    kind = type(scheduler)
    if kind.__module__.partition(".")[0] in ("torch", "lightning"):
        return
    for name, value in _attributes(scheduler).items():
        is_known = name in BY_GROUP or value is _last_rates(scheduler) or bool(_held(value))
        if not is_known and _length(value) == number:
            raise ValueError(
                f"{kind.__name__}.{name} has as many entries as the optimizer has groups, {number}, and nobody knows "
                "what they are to be when WeightDecayRules splits the groups. Make the scheduler afterwards: call "
                "WeightDecayRules(...).apply(optimizer, self) with the same rules before it in configure_optimizers."
            )


def _length(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return len(value) if value.ndim else None
    return len(value) if isinstance(value, list | tuple) else None


def _widen(scheduler: Any, sources: Sequence[int], number: int) -> None:
    """Repeat what a scheduler keeps for each of `number` groups, for those that they have been split into."""
    for name in BY_GROUP:
        values = _attributes(scheduler).get(name)
        if values is not None and _length(values) == number:
            setattr(scheduler, name, [_copy(values[source]) for source in sources])
    rates = _last_rates(scheduler)
    if _length(rates) == number:  # else it has been done: one that steps others has the list of one of them
        rates[:] = [_copy(rates[source]) for source in sources]
