"""A run between two batches, kept in host memory, so that it can go on from there in the same process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.callbacks.callback_states import kept_states, put_back
from lightning_hybrid.callbacks.rate_factors import RateFactors
from lightning_hybrid.compat import averaged_model, forget_unscaled, logged
from lightning_hybrid.functional.divergence import SpikeWindow
from lightning_hybrid.functional.trees import leaves_of
from lightning_hybrid.optim.wholes import local
from lightning_hybrid.parallel.pipeline.snapshot import ModuleState
from lightning_hybrid.parallel.streams import random_state, set_random_state


class HostCopies:
    """Copies of tensors in host memory, which is used again once a snapshot has given it back."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    def take(self, tensor: Tensor) -> Tensor:
        """A copy of what this rank has of a tensor."""
        part = local(tensor.detach())
        free = self._free.get((part.shape, part.dtype))
        copy = free.pop() if free else torch.empty(part.shape, dtype=part.dtype, pin_memory=part.device.type == "cuda")
        return copy.copy_(part)

    def give_back(self, copies: Sequence[Tensor]) -> None:
        """Copies that nobody needs any more."""
        for copy in copies:
            self._free.setdefault((copy.shape, copy.dtype), []).append(copy)


class Saved:
    """A value of an optimizer's state: tensors in it are copied, and put back into the same tensors.

    Args:
        value: Anything.
        copies: Where copies are made.
    """

    def __init__(self, value: Any, copies: HostCopies) -> None:
        self._value, self._tensors = value, [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]
        self.copies = [copies.take(tensor) for tensor in self._tensors]
        self._plain = None if isinstance(value, Tensor) else deepcopy(value, {id(t): t for t in self._tensors})

    def put_back(self) -> Any:
        """The value as it was."""
        for tensor, copy in zip(self._tensors, self.copies, strict=True):
            local(tensor.detach()).copy_(copy)
        if isinstance(self._value, Tensor):
            return self._value
        return deepcopy(self._plain, {id(tensor): tensor for tensor in self._tensors})


class RunSnapshot:
    """All that steps change, on this rank: nothing is communicated, and nothing changes its place meanwhile.

    Parameters, optimizers, buffers and attributes of the module, loss scale, schedules, counts of the loop, what the
    epoch has logged, states of callbacks, random streams. Data stays where it is.

    Args:
        trainer: Within an epoch of `fit`, between two steps of the optimizer.
        pl_module: Its module.
        copies: Memory for parameters and optimizer states.
        path: Of a checkpoint that is saved to have these instead; None keeps them in memory.
        detector: Goes back too, with what it has seen of the steps; None if nothing does.

    Attributes:
        batch: Batches of the epoch before it.
        step: Steps that the optimizer had applied.
    """

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        copies: HostCopies,
        path: str | None,
        detector: SpikeWindow | None = None,
    ) -> None:
        self._trainer, self._module, self._copies, self._path = trainer, pl_module, copies, path
        loop = trainer.fit_loop.epoch_loop
        self.batch, self.step = int(loop.batch_progress.current.ready), int(trainer.global_step)
        counts: list[Any] = [
            loop.batch_progress, loop.scheduler_progress, loop.automatic_optimization.optim_progress
        ]  # fmt: skip
        counts += [detector] if detector is not None else []
        self._counts = [(count, deepcopy(count.state_dict())) for count in counts]
        self._loop = loop.on_save_checkpoint()
        self._schedulers = [
            (config.scheduler, deepcopy(config.scheduler.state_dict())) for config in trainer.lr_scheduler_configs
        ]
        self._precision = deepcopy(trainer.precision_plugin.state_dict())
        self._callbacks = kept_states(trainer)
        known = [factors for each in trainer.optimizers if (factors := RateFactors.known(each)) is not None]
        self._factors = [(factors, factors.state_dict()) for factors in known]
        self._logged = {name: ModuleState(metric) for name, metric in logged(trainer).items()}
        self._random = random_state(trainer.strategy.root_device)
        self._parameters: list[tuple[Tensor, Tensor]] = []
        self._optimizers: list[tuple[Optimizer, list[dict[str, Saved]], dict[Any, dict[Any, Saved]]]] = []
        self._states: list[ModuleState] = []
        if path is not None:
            trainer.save_checkpoint(path)
        settled: Callable[..., Any] | None = getattr(trainer.strategy, "when_settled", None)
        self._keep_model() if settled is None else settled(self._keep_model)

    @property
    def num_bytes(self) -> int:
        """Host memory of parameters and optimizer states."""
        return sum(copy.nbytes for copy in self._memory)

    @torch.no_grad()
    def put_back(self) -> None:
        """Make the run as it was; any number of times."""
        self._put_model_back()
        self._put_counts_back()
        put_back(self._callbacks)
        set_random_state(self._random, self._trainer.strategy.root_device)

    def _put_model_back(self) -> None:
        for module in self._states:
            module.put_back()
        if self._path is not None:
            self._load(self._path)
        for parameter, copy in self._parameters:
            local(parameter.detach()).copy_(copy)
        for optimizer, groups, states in self._optimizers:
            optimizer.zero_grad()
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.update({name: option.put_back() for name, option in options.items()})
            optimizer.state.clear()
            for key, entries in states.items():
                optimizer.state[key] = {name: entry.put_back() for name, entry in entries.items()}
        for factors, state in self._factors:
            factors.give_back()
            factors.load_state_dict(state)

    def _load(self, path: str) -> None:
        strategy: Any = self._trainer.strategy
        for optimizer in self._trainer.optimizers:
            optimizer.zero_grad()
        if hasattr(strategy, "load_again"):
            strategy.load_again(path)
            return
        checkpoint = strategy.load_checkpoint(path, weights_only=False)
        strategy.load_model_state_dict(checkpoint)
        strategy.load_optimizer_state_dict(checkpoint)

    def _put_counts_back(self) -> None:
        precision, results = self._trainer.precision_plugin, logged(self._trainer)
        forget_unscaled(precision)
        precision.load_state_dict(deepcopy(self._precision))
        for owner, state in (*self._schedulers, *self._counts):
            owner.load_state_dict(deepcopy(state))
        self._trainer.fit_loop.epoch_loop.on_load_checkpoint(self._loop)
        for name in [name for name in results if name not in self._logged]:
            del results[name]
        for kept in self._logged.values():
            kept.put_back()

    def drop(self) -> None:
        """Give its memory back, and remove its checkpoint."""
        if self._path is not None:
            self._trainer.strategy.remove_checkpoint(self._path)
        self._copies.give_back(self._memory)
        self._parameters, self._optimizers = [], []

    @property
    def _memory(self) -> list[Tensor]:
        values = [
            value
            for _, groups, states in self._optimizers
            for entries in (*groups, *states.values())
            for value in entries.values()
        ]
        return [copy for _, copy in self._parameters] + [copy for value in values for copy in value.copies]

    @torch.no_grad()
    def _keep_model(self) -> None:
        callbacks: list[Any] = self._trainer.callbacks  # type: ignore[attr-defined]
        averages = [average for each in callbacks if (average := averaged_model(each)) is not None]
        self._states = [ModuleState(module) for module in (self._module, *averages)]
        if self._path is not None:
            return
        held = getattr(self._trainer.strategy, "held_parameters", None)
        parameters = list(self._module.parameters() if held is None else held().values())
        parameters += [parameter for average in averages for parameter in average.parameters()]
        self._parameters = [(parameter, self._copies.take(parameter)) for parameter in parameters]
        self._optimizers = [(each, *self._kept(each)) for each in self._trainer.optimizers]

    def _kept(self, optimizer: Optimizer) -> tuple[list[dict[str, Saved]], dict[Any, dict[Any, Saved]]]:
        groups = [
            {name: Saved(option, self._copies) for name, option in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        states = {
            key: {name: Saved(value, self._copies) for name, value in entries.items()}
            for key, entries in optimizer.state.items()
        }
        return groups, states
