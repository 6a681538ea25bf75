"""Optimizers that forget what they have accumulated, all of it or chosen entries of their states."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.optim import ASGD, SGD, Adagrad, NAdam, Optimizer, RMSprop, Rprop

from lightning_hybrid.optim.transition import MEMBERS, PREFIXES, OptimizerTransition
from lightning_hybrid.optim.wholes import local

Options = Mapping[str, Any]

AT_FIRST: dict[tuple[type[Optimizer], str], Callable[[Optimizer, Options], Any]] = {
    (SGD, "momentum_buffer"): lambda optimizer, group: None,  # there is none, and the first gradient becomes it
    (Adagrad, "sum"): lambda optimizer, group: optimizer.defaults["initial_accumulator_value"],
    (ASGD, "eta"): lambda optimizer, group: group["lr"],
    (ASGD, "mu"): lambda optimizer, group: 1.0,
    (NAdam, "mu_product"): lambda optimizer, group: 1.0,
    (Rprop, "step_size"): lambda optimizer, group: group["lr"],
}
"""Entries of torch's optimizers that do not begin with zeros, by the optimizer and its group."""


def made_by_constructor(optimizer: Optimizer) -> list[dict[str, Any]]:
    """For each group, what a new optimizer has of a parameter before its first step, as numbers.

    Most have nothing; torch's Adagrad has its sums. Where there are states, an optimizer of the same class and options
    is made over one number, and asked.

    Raises:
        ValueError: If the optimizer has states, and none can be made in this way.
    """
    if not optimizer.state:
        return [{} for _ in optimizer.param_groups]
    return [_new_entries(optimizer, group, group["params"]) for group in optimizer.param_groups]


def forget_all(optimizer: Optimizer, made: list[dict[str, Any]]) -> None:
    """Make the next step that of a new optimizer with the present groups.

    What an optimizer keeps in its groups, such as the step of an `OptimizerTransition`, stays.

    Args:
        optimizer: Changed in place.
        made: As `made_by_constructor` found it, before the first step; groups that have been added since have nothing.
    """
    old = dict(optimizer.state)
    optimizer.state.clear()
    for group, entries in zip(optimizer.param_groups, made, strict=False):
        for parameter in (parameter for parameter in group["params"] if entries and parameter in old):
            state = old[parameter]
            optimizer.state[parameter] = {name: _as(state[name], number) for name, number in entries.items()}


@torch.no_grad()
def forget_entries(optimizer: Optimizer, names: Collection[str]) -> None:
    """Give chosen entries the values that they begin with: zeros, if `AT_FIRST` says nothing else.

    Args:
        optimizer: Changed in place.
        names: Of entries; parameters without them are left alone.

    Raises:
        TypeError: If an entry is neither a tensor nor a number.
    """
    for group in optimizer.param_groups:
        for state in (optimizer.state[parameter] for parameter in group["params"] if parameter in optimizer.state):
            for name in names & state.keys():
                first = _at_first(optimizer, group, name)
                if first is None:
                    del state[name]
                else:
                    state[name] = _as(_checked(optimizer, name, state[name]), first)


def check_together(optimizer: Optimizer, names: Collection[str]) -> None:
    """Refuse entries that cannot be cleared without another one.

    Raises:
        ValueError: If the mean square of a centered RMSprop is named without the mean, whose square is taken from it.
    """
    centered = isinstance(optimizer, RMSprop) and any(group["centered"] for group in optimizer.param_groups)
    if centered and "square_avg" in names and "grad_avg" not in names:
        raise ValueError(
            f"{type(optimizer).__name__} with centered=True takes the square of grad_avg from square_avg, which would "
            "be below zero when square_avg alone is cleared. Name both in keys."
        )


def entries_of(optimizer: Optimizer) -> set[str]:
    """Names of entries that the state of any parameter here has."""
    return {name for parameter in _parameters(optimizer) for name in optimizer.state.get(parameter, ())}


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _as(value: Any, number: Any) -> Any:
    """A number in the place of a value, in its memory if it is a tensor."""
    if isinstance(value, Tensor):
        local(value).fill_(number)
        return value
    return type(value)(number)


def _checked(optimizer: Optimizer, name: str, value: Any) -> Any:
    if not isinstance(value, Tensor | int | float):
        raise TypeError(
            f"{type(optimizer).__name__} keeps {name!r} as a {type(value).__name__}, which has no zero. Leave keys "
            "out, to clear everything."
        )
    return value


def _at_first(optimizer: Optimizer, group: Options, name: str) -> Any:
    if isinstance(optimizer, OptimizerTransition):
        for prefix, (inner, own) in zip(PREFIXES, optimizer.inner_options(group), strict=True):
            if name.startswith(prefix):
                return _at_first(inner, own, name.removeprefix(prefix))
    found = (value for (kind, entry), value in AT_FIRST.items() if entry == name and isinstance(optimizer, kind))
    return next(found, lambda *_: 0)(optimizer, group)


def _new_entries(optimizer: Optimizer, group: Options, like: list[Tensor]) -> dict[str, Any]:
    if isinstance(optimizer, OptimizerTransition):
        return {
            prefix + name: value
            for prefix, (inner, own) in zip(PREFIXES, optimizer.inner_options(group), strict=True)
            for name, value in _new_entries(inner, own, like).items()
        }
    if not like:
        return {}
    one = torch.zeros(1, dtype=like[0].dtype, device=like[0].device)
    known = signature(type(optimizer)).parameters
    keywords = {name: value for name, value in optimizer.defaults.items() if name in known}
    options = {name: value for name, value in group.items() if name not in MEMBERS}
    try:
        state = type(optimizer)([{**options, "params": [one]}], **keywords).state.get(one, {})
        return {name: value.item() if isinstance(value, Tensor) else value for name, value in state.items()}
    except Exception as error:
        raise ValueError(
            f"{type(optimizer).__name__} has states before the first step, and what a new one has is not known: "
            f"to make one with {keywords} gives {error!r}. Name the entries to be cleared by keys."
        ) from error
