"""From one optimizer to another, by a schedule: both step from the same weights, and the step is a mean of the two."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hybrid.compat import foreach
from lightning_hybrid.optim.base import check_options
from lightning_hybrid.optim.transition_checks import check_alone, check_pair, check_unscheduled
from lightning_hybrid.optim.wholes import Dealing, local

MEMBERS = ("params", "param_names")
PREFIXES = ("first_", "second_")
KEEP_GRADIENTS = ("torch.optim.", "lightning_hybrid.")  # optimizers of others may write in them


class OptimizerTransition(Optimizer):
    """Goes over from one optimizer to another.

    In each step both go from the same weights by the same gradients. With the schedule's weight s of the second::

        w = w + (1 - s) (step of the first) + s (step of the second)

    At s = 0 that is the first's step, at s = 1 the second's, to the bit. The second steps all the time, so that it
    has statistics of its own when it takes over; the first as long as its weight is above 0, and what it knows is then
    that of its last step. While both step, there is a copy of this process's part of the weights, and for a moment a
    second one of a single parameter; gradients are copied too if the second is neither torch's nor ours, or uses
    `nesterov`.

    Everything is in this optimizer's own groups and states: an option `betas` of the first is `first_betas` in a group,
    its state `exp_avg` is `first_exp_avg`. `lr`, 1.0 at first, is a factor of both rates, `first_lr` and `second_lr`:
    schedulers see an optimizer like any other, and are made for this one. The two optimizers belong to it from now on;
    between steps they hold neither parameters nor states.

    Args:
        first: Any optimizer that keeps what it knows in its groups and in states of parameters.
        second: Another one, over the same parameters in the same groups.
        schedule: Weight of the second in step 0, 1, ..., such as `transition_schedule(...)`. It depends on the step
            alone, so that all processes have the same.

    Attributes:
        last_weight: Weight of the second in the last step, to be logged; None before the first.

    Raises:
        ValueError: If the two have different parameters, one needs a closure or sparse gradients, or has no `lr`, or a
            scheduler is made for one of them.

    Source: The idea is Akiba et al.'s (2017); `RMSpropToSGD` is theirs, whose two halves share a momentum buffer.
    """

    last_weight: float | None = None

    def __init__(self, first: Optimizer, second: Optimizer, schedule: Callable[[int], float]) -> None:
        for optimizer in (first, second):
            check_alone(optimizer)
        check_pair(first, second)
        if not callable(schedule):
            raise ValueError(f"schedule={schedule!r} must give the weight of the second optimizer for each step.")
        self._schedule = schedule
        self._parts = tuple(_Part(prefix, each) for prefix, each in zip(PREFIXES, (first, second), strict=True))
        groups: list[dict[str, Any]] = [{} for _ in first.param_groups]
        defaults: dict[str, Any] = {"lr": 1.0, "step": 0}
        for part in self._parts:
            defaults |= _prefixed(part.optimizer.defaults, part.prefix)
            for group, own in zip(groups, part.optimizer.param_groups, strict=True):
                group |= _prefixed(own, part.prefix) | {name: own[name] for name in MEMBERS if name in own}
        super().__init__(groups, defaults)
        for part in self._parts:
            part.give_back(self)

    @property
    def inner(self) -> tuple[Optimizer, Optimizer]:
        """The first and the second; their groups say what they were in the last step."""
        first, second = self._parts
        return first.optimizer, second.optimizer

    def inner_options(self, group: Mapping[str, Any]) -> list[tuple[Optimizer, dict[str, Any]]]:
        """The two optimizers, each with its part of a group's options."""
        return [(part.optimizer, _stripped(group, part.prefix)) for part in self._parts]

    @property
    def extra_dealings(self) -> Callable[[], Mapping[Tensor, Sequence[Dealing]]] | None:
        """As `WholeTensorOptimizer` says, of those of the two that are such; None if neither is."""
        return next((each.extra_dealings for each in self.inner if hasattr(each, "extra_dealings")), None)

    @extra_dealings.setter
    def extra_dealings(self, dealings: Callable[[], Mapping[Tensor, Sequence[Dealing]]] | None) -> None:
        for each in (each for each in self.inner if hasattr(each, "extra_dealings")):
            each.extra_dealings = dealings

    def collapsed(self, entry: str, shape: Sequence[int]) -> frozenset[int]:
        """As `WholeTensorOptimizer` says; the optimizer that the entry is of is asked, if it knows."""
        for part in self._parts:
            if entry.startswith(part.prefix) and hasattr(part.optimizer, "collapsed"):
                found: frozenset[int] = part.optimizer.collapsed(entry.removeprefix(part.prefix), shape)
                return found
        return frozenset()

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step.

        Args:
            closure: Evaluates the model again and returns the loss; called once.

        Returns:
            The loss, if there is a closure.

        Raises:
            ValueError: If the schedule gives a weight outside [0, 1]; nothing has moved then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        number = self.param_groups[0]["step"]
        weight = float(self._schedule(number))
        if not 0 <= weight <= 1:
            raise ValueError(
                f"The schedule of OptimizerTransition gives {weight} in step {number}. The weight of the second "
                "optimizer must be from 0 to 1 in each step."
            )
        self.last_weight = float(weight)
        if weight == 1:
            self._parts[1].step(self)
        else:
            self._step_both(weight)
        for group in self.param_groups:
            group["step"] = number + 1
        return loss

    def _step_both(self, weight: float) -> None:
        first, second = self._parts
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        here = [local(parameter) for parameter in held]
        others = [tensor.clone() for tensor in here]
        gradients = [] if second.keeps_gradients(self) else [(parameter, parameter.grad) for parameter in held]
        for parameter, gradient in gradients:
            parameter.grad = gradient.clone()
        second.step(self)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for tensor, other in zip(here, others, strict=True):
            end = tensor.clone()
            tensor.copy_(other)
            other.copy_(end)
        first.step(self)
        if weight and here:  # at 0 the second's end does not count, be it finite or not
            foreach("lerp_")(here, others, weight)  # of both ends: they have the same start

    @override
    def load_state_dict(self, state_dict: Any) -> None:
        check_options(self, state_dict["param_groups"])
        seen: dict[str, Any] = {}
        last = self.register_load_state_dict_pre_hook(lambda _, state: seen.update(state))
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
        for part in self._parts:  # each knows which of its states keep their types, such as counts of steps
            part.load(self, seen)

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_schedule": self._schedule, "_parts": self._parts}


class _Part:
    """One of the two optimizers: it has the parameters and its states while it steps."""

    def __init__(self, prefix: str, optimizer: Optimizer) -> None:
        self.prefix, self.optimizer = prefix, optimizer
        self._is_known = all(type(each).__module__.startswith(KEEP_GRADIENTS) for each in flattened([optimizer]))

    def keeps_gradients(self, outer: Optimizer) -> bool:
        """Whether gradients are the same after its step; torch's SGD with `foreach` looks ahead in their memory."""
        own = [name for name in outer.defaults if name.startswith(self.prefix) and name.endswith("nesterov")]
        looks_ahead = any(group.get(name) for group in outer.param_groups for name in own)
        return self._is_known and not looks_ahead

    def step(self, outer: Optimizer) -> None:
        """Step with the outer optimizer's parameters."""
        self.borrow(outer)
        self.optimizer.step()
        self.give_back(outer)

    def borrow(self, outer: Optimizer) -> None:
        """Take groups and states; other groups than before, if it has others."""
        check_unscheduled(self.optimizer)
        self.optimizer.param_groups = [
            _stripped(group, self.prefix)
            | {"lr": self._rate(group)}
            | {name: group[name] for name in MEMBERS if name in group}
            for group in outer.param_groups
        ]
        states = {parameter: _stripped(state, self.prefix) for parameter, state in outer.state.items()}
        self.optimizer.state = defaultdict(dict, {parameter: state for parameter, state in states.items() if state})

    def give_back(self, outer: Optimizer) -> None:
        """Let the outer optimizer have options and states as they are now.

        Raises:
            RuntimeError: If the step has changed what the outer optimizer decides, or keeps what is not a parameter's.
        """
        name = type(self.optimizer).__name__
        for group, own in zip(outer.param_groups, self.optimizer.param_groups, strict=True):
            if own["lr"] != self._rate(group):
                raise RuntimeError(
                    f"{name} has set its own lr from {self._rate(group)} to {own['lr']} in a step of an "
                    "OptimizerTransition, which sets it for each step. Choose an optimizer that leaves lr alone."
                )
            group |= _prefixed({key: value for key, value in own.items() if key != "lr"}, self.prefix)
            own["params"] = []
        for parameter, state in self.optimizer.state.items():
            if not isinstance(parameter, Tensor):
                raise RuntimeError(
                    f"{name} keeps a state {parameter!r} that belongs to no parameter, which an OptimizerTransition "
                    "would lose in checkpoints. Choose an optimizer whose states are those of parameters."
                )
            others = {key: value for key, value in outer.state[parameter].items() if not key.startswith(self.prefix)}
            outer.state[parameter] = others | _prefixed(state, self.prefix)
        self.optimizer.state = defaultdict(dict)

    def load(self, outer: Optimizer, saved: Mapping[str, Any]) -> None:
        """Load its part of a saved state as it does itself; the outer optimizer has loaded the groups."""
        self.borrow(outer)
        states = {
            key: _stripped(state, self.prefix) for key, state in saved["state"].items() if isinstance(state, dict)
        }
        groups = [
            own | {"params": old["params"]}
            for own, old in zip(self.optimizer.param_groups, saved["param_groups"], strict=True)
        ]
        self.optimizer.load_state_dict(
            {"state": {k: state for k, state in states.items() if state}, "param_groups": groups}
        )
        self.give_back(outer)

    def _rate(self, group: Mapping[str, Any]) -> Any:
        return group[f"{self.prefix}lr"] * group["lr"]


def flattened(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Optimizers, with the two of each transition in its place."""
    return [
        each
        for optimizer in optimizers
        for each in (flattened(optimizer.inner) if isinstance(optimizer, OptimizerTransition) else [optimizer])
    ]


def _prefixed(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {prefix + key: value for key, value in values.items() if key not in MEMBERS}


def _stripped(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
