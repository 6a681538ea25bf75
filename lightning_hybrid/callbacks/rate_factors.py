"""Factors of learning rates, for the time of an optimizer's update alone, so that no schedule meets them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from math import isfinite, prod
from typing import Any
from weakref import WeakKeyDictionary

from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.callbacks.applied_steps import was_applied

Factor = Callable[[int], float]
Momentum = Callable[[int, float], float]

_attached: WeakKeyDictionary[Optimizer, RateFactors] = WeakKeyDictionary()


class RateFactors:
    """What multiplies the learning rates of one optimizer.

    In the update, and nowhere else, each group's `lr` is the value that it has otherwise, times all factors. Schedules,
    closed or recursive ones, checkpoints, and code that reads or writes `lr`, in closures too, have the value without
    factors. Where all factors are 1, nothing is touched.

    The update of step t has the factors of t, the number of steps before it that were *applied*: where a loss scaler
    skips one, it does not count.

    Attributes:
        steps: Number of applied steps.

    Source: `torch.optim.lr_scheduler.ChainedScheduler` and `SequentialLR` combine schedules that were made for it, and
    not `ReduceLROnPlateau` or rates that code sets.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._factors: dict[Hashable, Factor] = {}
        self._momenta: dict[Hashable, Momentum] = {}
        self._correcting: set[Hashable] = set()
        self._own: list[tuple[dict[str, Any], dict[str, Any]]] = []  # groups, and what an update's end gives them back
        self._rates: list[float | Tensor] = []
        self._in_buffers: list[float | Tensor] = []
        self._factor = 1.0

    @classmethod
    def of(cls, optimizer: Optimizer | LightningOptimizer) -> RateFactors:
        """Those of an optimizer, which has one object for all who ask.

        Raises:
            TypeError: If it is not torch's kind of optimizer, whose steps have hooks.
            ValueError: If one of its groups has no `lr`.
        """
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if optimizer not in _attached:
            _check(optimizer)
            factors = _attached[optimizer] = cls()
            optimizer.register_step_pre_hook(factors._before)
            optimizer.register_step_post_hook(factors._after)
        return _attached[optimizer]

    @classmethod
    def known(cls, optimizer: Optimizer) -> RateFactors | None:
        """Those of an optimizer that somebody has asked for."""
        return _attached.get(optimizer)

    def set(
        self,
        key: Hashable,
        factor: Factor | float,
        momentum: Momentum | None = None,
        correct_momentum: bool = False,
    ) -> None:
        """Multiply by a factor, in place of the one that the key had.

        Args:
            key: Who asks; factors of several keys multiply.
            factor: A number, or a function of the number of steps applied so far, 0 before the first.
            momentum: The momentum (`momentum`, or the first of `betas`) of an update, by the number of steps applied so
                far and the group's own value.
            correct_momentum: Whether buffers `momentum_buffer` hold the rate, v = m v + lr g, and are multiplied by
                lr[t+1] / lr[t] when it changes, be it by a factor or the schedule. Where lr[t+1] is 0 they are cleared,
                so that weights stand still, and begin anew.
        """
        self._factors[key] = factor if callable(factor) else lambda _: factor
        self._momenta.pop(key, None)
        self._correcting.discard(key)
        if momentum is not None:
            self._momenta[key] = momentum
        if correct_momentum:
            self._correcting.add(key)

    def remove(self, key: Hashable) -> None:
        """Take back what the key has set, if anything."""
        self._factors.pop(key, None)
        self._momenta.pop(key, None)
        self._correcting.discard(key)

    @property
    def effective_rates(self) -> list[float]:
        """Rate of each group in the last applied step; empty before the first."""
        return [float(rate) for rate in self._rates]

    def give_back(self) -> None:
        """Let groups have their own values again, after an update that raised; nothing to do otherwise."""
        for group, own in self._own:
            group.update(own)
        self._own = []

    def state_dict(self) -> dict[str, Any]:
        """What a run that goes on needs: the number of steps, and the rates of the last one."""
        return {
            "steps": self.steps,
            "rates": self.effective_rates,
            "rates_in_buffers": list(map(float, self._in_buffers)),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.steps, self._rates = state_dict["steps"], list(state_dict["rates"])
        self._in_buffers = list(state_dict["rates_in_buffers"])

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.give_back()
        self._factor = prod(factor(self.steps) for factor in self._factors.values())
        if not (isfinite(self._factor) and self._factor >= 0):
            raise ValueError(
                f"The factors of the learning rates of {type(optimizer).__name__} multiply to {self._factor} in step "
                f"{self.steps}. Each must be finite and at least 0."
            )
        self._apply(optimizer)
        positional = list(args)  # with the optimizer, and perhaps the closure
        if len(positional) > 1 and callable(positional[1]):
            positional[1] = self._around(optimizer, positional[1])
        elif callable(kwargs.get("closure")):
            kwargs = kwargs | {"closure": self._around(optimizer, kwargs["closure"])}
        return tuple(positional), kwargs

    def _around(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure that runs forward and backward with the groups' own values, and may change them."""

        def run() -> Any:
            self.give_back()
            result = closure()
            self._apply(optimizer)
            return result

        return run

    def _apply(self, optimizer: Optimizer) -> None:
        groups = optimizer.param_groups
        changes = [self._changes(group) for group in groups]
        self._own = [(group, {name: group[name] for name in new}) for group, new in zip(groups, changes, strict=True)]
        for group, new in zip(groups, changes, strict=True):
            group.update(new)
        before, self._in_buffers = self._in_buffers, _rates(optimizer)
        if self._correcting and len(before) == len(groups):
            self._correct(optimizer, before)

    def _changes(self, group: dict[str, Any]) -> dict[str, Any]:
        new = {} if self._factor == 1 else {"lr": group["lr"] * self._factor}
        for momentum in self._momenta.values():
            if "betas" in group:
                first, *others = new.get("betas", group["betas"])
                new["betas"] = (momentum(self.steps, first), *others)
            elif "momentum" in group:
                new["momentum"] = momentum(self.steps, new.get("momentum", group["momentum"]))
        return new

    def _correct(self, optimizer: Optimizer, before: list[float | Tensor]) -> None:
        """Multiply buffers by how the rate in them has changed (arXiv:1706.02677, section 3.2)."""
        for group, old, new in zip(optimizer.param_groups, map(float, before), _rates(optimizer), strict=True):
            if old in (float(new), 0.0):  # after a rate of 0 they are clear
                continue
            for parameter in group["params"]:
                buffer = optimizer.state[parameter].get("momentum_buffer") if parameter in optimizer.state else None
                if buffer is not None:
                    buffer.mul_(float(new) / old)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rates = _rates(optimizer)
        self.give_back()
        if was_applied(optimizer):
            self._rates = rates
            self.steps += 1


def _rates(optimizer: Optimizer) -> list[float | Tensor]:
    """Copies, since schedulers write rates that are tensors in place."""
    rates = [group["lr"] for group in optimizer.param_groups]
    return [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]


def _check(optimizer: Optimizer) -> None:
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{kind} is no torch.optim.Optimizer, so that the learning rate of its update cannot be multiplied. Take "
            "a strategy that steps torch's optimizers, such as 'ddp' or 'hybrid_ptdp'."
        )
    for index, group in enumerate(optimizer.param_groups):
        if isinstance(group.get("lr"), bool) or not isinstance(group.get("lr"), int | float | Tensor):
            raise ValueError(
                f"Group {index} of {kind} has lr={group.get('lr')!r}, which cannot be multiplied. Give it a learning "
                "rate, or leave the callbacks out that change rates."
            )
