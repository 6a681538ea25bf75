"""Optimizers that the user made over the whole model, kept to the parameters that this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.optim.base import collapsed_dims
from lightning_hybrid.optim.wholes import Dealing
from lightning_hybrid.parallel.zero.shards import shard_like
from lightning_hybrid.parallel.zero.units import loose_parameters
from lightning_hybrid.strategies.optimizer_checks import check_complete


class ParameterGroups:
    """Which parameters of the whole model each optimizer has, by name.

    Args:
        optimizers: As `configure_optimizers` returned them, before the model was cut.
        module: The whole model.

    Attributes:
        names: For each optimizer and group, names in the whole model.
        given: The names that the optimizer was made with, or None.

    Raises:
        ValueError: If an optimizer holds a tensor that is no parameter of the model, or LightningCLI's was made before
            some of the parameters.
    """

    def __init__(self, optimizers: Sequence[Optimizer], module: nn.Module) -> None:
        check_complete(module)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._optimizers = list(optimizers)
        for optimizer in optimizers:
            for parameter in (p for group in optimizer.param_groups for p in group["params"] if id(p) not in names):
                raise ValueError(
                    f"{type(optimizer).__name__} holds a tensor of shape {list(parameter.shape)} that is not a "
                    "parameter of the LightningModule. Register it as one, so that it can be given to the right stage."
                )
        self.names: list[list[list[str]]] = [
            [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups] for optimizer in optimizers
        ]
        self.given = [[group.get("param_names") for group in optimizer.param_groups] for optimizer in optimizers]
        self._shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        self._held = [[list(names) for names in groups] for groups in self.names]

    def check_unmixed(self, module: nn.Module, main: torch.dtype | None) -> None:
        """Refuse groups that a step over many tensors at once could not work on: some are going to be sharded.

        Args:
            module: The whole model.
            main: Type of what is going to be sharded; None for the one that most parameters have.

        Raises:
            ValueError: Naming the parameters that stay whole.
        """
        loose = loose_parameters(module, main)
        for optimizer, groups in zip(self._optimizers, self.names, strict=True):
            for group, names in zip(optimizer.param_groups, groups, strict=True):
                whole = [name for name in names if name in loose]
                many = (name for name, value in group.items() if name.endswith(("fused", "foreach")) and value)
                option = next(many, None)
                if option is not None and 0 < len(whole) < len(names):
                    raise ValueError(
                        f"{type(optimizer).__name__}({option}=True) has {', '.join(whole[:5])} ({len(whole)} in all) "
                        "in one group with parameters that are sharded. They stay whole, because they are scalars, "
                        "empty, not contiguous or of a second type, and torch cannot mix the two in one call. Give "
                        f"them a group of their own, or leave {option} out."
                    )

    def take(self, part: Callable[[str, Any], Any]) -> None:
        """Keep this rank's parts of states that an optimizer has made of whole parameters when it was made.

        Args:
            part: Gives the part of a value, by its parameter's name.
        """
        for optimizer, groups in zip(self._optimizers, self._held, strict=True):
            for group, names in zip(optimizer.param_groups, groups, strict=True):
                for name, parameter in zip(names, group["params"], strict=True):
                    if parameter in optimizer.state:
                        state = optimizer.state[parameter]
                        state.update({entry: part(name, value) for entry, value in state.items()})

    def tell(self, dealings: Callable[[], Mapping[Tensor, Sequence[Dealing]]]) -> None:
        """Let optimizers that look at whole tensors know of slices that are plain tensors."""
        for optimizer in self._optimizers:
            if hasattr(optimizer, "extra_dealings"):
                optimizer.extra_dealings = dealings

    def keep(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Reduce each group to the given parameters, and take their present objects: sharding has replaced some."""
        for optimizer, groups, given, held in zip(self._optimizers, self.names, self.given, self._held, strict=True):
            for index, (group, names) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
                old = dict(zip(held[index], group["params"], strict=True))
                held[index] = [name for name in names if name in parameters]
                group["params"] = [parameters[name] for name in held[index]]
                own_names = given[index]
                if own_names is not None:  # the optimizer was made from named parameters
                    group["param_names"] = [
                        own for own, name in zip(own_names, names, strict=True) if name in parameters
                    ]
                self._move_state(optimizer, old, parameters)

    def _move_state(
        self, optimizer: Optimizer, old: Mapping[str, nn.Parameter], new: Mapping[str, nn.Parameter]
    ) -> None:
        for name, parameter in old.items():
            if parameter in optimizer.state and new.get(name) is not parameter:
                state = optimizer.state.pop(parameter)
                if name in new:  # from a checkpoint, before the parameter was sharded
                    shape = self._shapes[name]
                    optimizer.state[new[name]] = {
                        entry: shard_like(value, new[name], collapsed=collapsed_dims(optimizer, entry, shape))
                        for entry, value in state.items()
                    }
