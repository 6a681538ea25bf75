"""The rate factors of all optimizers of one fit: attached, kept in checkpoints, logged, and taken back."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim import Optimizer

from lightning_hybrid.callbacks.rate_factors import RateFactors
from lightning_hybrid.callbacks.reports import is_logging_step

STATES = "rate_factors"
"""Entry of a callback's state; all callbacks with such an entry have the same in it."""


class FitFactors:
    """What a callback that changes rates has of the optimizers, from `on_fit_start` to the end.

    Attributes:
        optimizers: All of the fit.
        runs: Training has begun, so that states are loaded at once.
    """

    def __init__(self) -> None:
        self.optimizers: list[Optimizer] = []
        self.runs = False
        self._states: Sequence[Mapping[str, Any]] | None = None
        self._is_attached = False

    def __iter__(self) -> Iterator[RateFactors]:
        return iter([RateFactors.of(optimizer) for optimizer in self.optimizers])

    def reset(self) -> None:
        """Forget states of a fit that has ended; call it in `setup`, before a checkpoint is restored."""
        self._states, self._is_attached, self.runs = None, False, False

    def attach(self, trainer: Trainer, name: str) -> bool:
        """Find the optimizers, and refuse those whose rates cannot be changed.

        Args:
            trainer: In `on_fit_start`.
            name: Of the callback.

        Returns:
            Whether they begin: they are not those of the fit before, and no checkpoint has been loaded.

        Raises:
            TypeError: If an optimizer is not torch's.
            ValueError: If there is none, or one has no `lr`.
        """
        found: Sequence[Any] = trainer.optimizers
        optimizers = [each.optimizer if isinstance(each, LightningOptimizer) else each for each in found]
        if not any(getattr(optimizer, "param_groups", True) for optimizer in optimizers):  # Lightning's stand-in
            raise ValueError(
                f"configure_optimizers has returned no optimizer whose learning rate {name} could change. Return one, "
                "or leave the callback out."
            )
        for optimizer in optimizers:
            RateFactors.of(optimizer)
        before, self.optimizers, self._is_attached = self.optimizers, optimizers, True
        return self._states is None and list(map(id, before)) != list(map(id, optimizers))

    def index(self, optimizer: Optimizer) -> int:
        """Position of an optimizer."""
        return next(index for index, each in enumerate(self.optimizers) if each is optimizer)

    def state(self) -> Sequence[Mapping[str, Any]]:
        """Of each optimizer, for a checkpoint; none before the fit has found them, as a LearningRateFinder saves."""
        if self._states is None and self._is_attached:
            return [factors.state_dict() for factors in self]
        return self._states or []

    def keep(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take a checkpoint's, for `resume`, or at once while training; one from before a fit has none."""
        self._states = states or None
        if self.runs:
            self.resume()

    def resume(self) -> None:
        """Go on from the checkpoint, if there is one; call it in `on_train_start`, when all has been loaded.

        Raises:
            ValueError: If it is of other optimizers.
        """
        states, self._states, self.runs = self._states, None, True
        if states is None:
            return
        if len(states) != len(self.optimizers):
            raise ValueError(
                f"The checkpoint has counted the steps of {len(states)} optimizers, and now there are "
                f"{len(self.optimizers)}. Resume with the same optimizers."
            )
        for factors, state in zip(self, states, strict=True):
            factors.load_state_dict(state)

    def log(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the rates of the last step as `learning_rate/<optimizer>[-index][/group]`, every `log_every_n_steps`."""
        if not is_logging_step(trainer):
            return
        for index, (optimizer, factors) in enumerate(zip(self.optimizers, self, strict=True)):
            name = f"learning_rate/{type(optimizer).__name__}" + (f"-{index}" if len(self.optimizers) > 1 else "")
            rates = factors.effective_rates
            for number, rate in enumerate(rates):
                group = optimizer.param_groups[number].get("name", number)
                pl_module.log(f"{name}/{group}" if len(rates) > 1 else name, rate, batch_size=1)

    def release(self, key: Hashable) -> None:
        """Take back what a callback has set, also within a step that has failed."""
        self.runs = False
        for factors in self:
            factors.give_back()
            factors.remove(key)


def saved_state(checkpoint: Mapping[str, Any], own: str) -> Mapping[str, Any] | None:
    """A callback's state in a checkpoint: its own, or else that of one of its kind with other arguments.

    Args:
        checkpoint: As `on_load_checkpoint` has it.
        own: The callback's `state_key`, `Kind{...}`.
    """
    states: Mapping[str, Any] = checkpoint["callbacks"]
    kind = own.partition("{")[0]
    ranked = [own, *(key for key in states if str(key).partition("{")[0] == kind)]
    return next((states[key] for key in ranked if key in states), None)


def states_of_any(checkpoint: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """What a checkpoint has of the optimizers' rate factors, whichever callback has saved it; none if no one has."""
    states: Mapping[str, Any] = checkpoint["callbacks"]
    return next((state[STATES] for state in states.values() if isinstance(state, Mapping) and STATES in state), [])
