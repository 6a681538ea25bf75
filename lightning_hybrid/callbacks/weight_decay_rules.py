"""Multipliers of weight decay, by names of parameters and types of modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from math import isfinite
from typing import Any
from weakref import WeakKeyDictionary

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from rich.table import Table
from torch import nn
from torch.distributed.fsdp import FlatParameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hybrid.callbacks.group_splitting import optimizers_and_schedulers, split_groups, weight_decays
from lightning_hybrid.callbacks.reports import show
from lightning_hybrid.functional.name_rules import Place, first_match, places, public_name

COLUMNS = ("rule", "multiplier", "weight decay", "parameters", "elements", "such as")
HOOK = "configure_optimizers"
NUM_NAMES = 3
OTHERS = "(all others)"

_applied: WeakKeyDictionary[Optimizer, list[tuple[str | type[nn.Module], float]]] = WeakKeyDictionary()
"""Rules that an optimizer's groups have; LightningCLI gives each `fit` the same optimizer."""


class WeightDecayRules(Callback):
    """Multiplies the weight decay of some parameters, with any optimizer that has one, and with any strategy.

    The groups of the optimizers that `configure_optimizers` returns are split in place into groups of one multiplier:
    first what no rule is about, then in the order of the rules. Schedulers that were made before learn of it. Options
    whose names end with `_weight_decay` are multiplied too. Rank 0 prints a table of what each rule came to.

    A run that goes on from a checkpoint takes the options of groups from there, with a warning if they differ; groups
    of other parameters are refused.

    Args:
        rules: Multipliers, at least 0, by patterns of names or types of modules. The first that matches a parameter
            counts, and without one its weight decay stays. A type stands for the parameters in modules of it, within
            the LightningModule. A string is a pattern as of `fnmatch`, and stands for parameters with components of
            their names, one or several that follow each other, that match it: "head" for `model.head.weight`, "norm*"
            for `blocks.0.norm1.bias`, "*bias" for what ends so, `in_proj_bias` too. Or it is the name of a type, or a
            pattern of such names: "LayerNorm", "*Norm*".

    Raises:
        ValueError: If there is no rule, or a multiplier is negative or not finite.
        TypeError: If a rule is neither a string nor a type of modules, or a multiplier is no number.

    Source: Jia et al. 2018, arXiv:1807.11205, train without weight decay of biases and batch normalisation.
    """

    goes_back = False  # nothing changes while a fit goes on

    def __init__(self, rules: Mapping[str | type[nn.Module], float]) -> None:
        if not isinstance(rules, Mapping) or not rules:
            raise ValueError(f"rules={rules!r}: give patterns with their multipliers, such as {{'*bias': 0}}.")
        for rule, multiplier in rules.items():
            _check_rule(rule, multiplier)
        self.rules = dict(rules)
        self._given: dict[str, Any] | None = None  # what the module had of its own in the hook's place
        self._optimizers: list[Optimizer] = []
        self._decays: list[list[dict[str, Any]]] = []
        self._names: list[list[list[str]]] = []
        self._saved: list[list[list[str]]] = []
        self._rows: list[tuple[str, ...]] = []

    def apply(self, optimizer: Optimizer, module: nn.Module, schedulers: Sequence[Any] = ()) -> None:
        """Split the groups of one optimizer, in place: for use in `configure_optimizers`, or without a Trainer.

        Applying the same rules to an optimizer again changes nothing.

        Args:
            optimizer: Over parameters of the module.
            module: The whole module, whose names rules are about.
            schedulers: Those of the optimizer that have been made already.

        Raises:
            ValueError: If a group has no weight decay, other rules have been applied, or nobody knows what a scheduler
                keeps for each group. Nothing has been changed then.
        """
        self._apply(optimizer, self._numbers([optimizer], places(module)), schedulers)

    def table(self) -> Table:
        """What each rule came to when the optimizers were made."""
        table = Table(title="Weight decay by rule")
        for column in COLUMNS:
            table.add_column(column, justify="left" if column in (COLUMNS[0], COLUMNS[-1]) else "right")
        for row in self._rows:
            table.add_row(*row)
        return table

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._restore(pl_module)
            self._optimizers, self._saved = [], []
            self._given = {name: value for name, value in vars(pl_module).items() if name == HOOK}
            vars(pl_module)[HOOK] = self._around(pl_module.configure_optimizers, trainer, pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._optimizers:
            raise RuntimeError(
                f"{type(trainer.strategy).__name__} has not called configure_optimizers, so that WeightDecayRules had "
                "nothing to split. Return the optimizers there, or leave WeightDecayRules out."
            )
        self._check_saved()
        if self._decays != [_decays_of(optimizer) for optimizer in self._optimizers]:
            rank_zero_warn(
                "The groups have other weight decays than the rules came to, since a checkpoint's options count. Load "
                "the weights alone (load_from_checkpoint) to begin with new rules."
            )

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._restore(pl_module)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore(pl_module)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"groups": self._names}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict["groups"]

    def _around(self, configure: Callable[[], Any], trainer: Trainer, module: LightningModule) -> Callable[[], Any]:
        @wraps(configure)
        def configure_optimizers() -> Any:
            configured = configure()
            self._take(configured, module)
            show(trainer, self.table())
            return configured

        return configure_optimizers

    def _restore(self, module: LightningModule) -> None:
        if self._given is not None:
            vars(module).pop(HOOK, None)
            vars(module).update(self._given)
        self._given = None

    def _take(self, configured: Any, module: LightningModule) -> None:
        """Split the groups of all optimizers, and note what came of it."""
        optimizers, schedulers = optimizers_and_schedulers(configured)
        if not optimizers:
            raise ValueError(
                f"configure_optimizers has returned {configured!r}, with no optimizer for WeightDecayRules to work on. "
                "Return one, or leave WeightDecayRules out."
            )
        where = places(module)
        numbers = self._numbers(optimizers, where)
        for optimizer in optimizers:
            self._apply(optimizer, numbers, schedulers)
        name_of = {number: public_name(place.names[0]) for number, place in where.items()}
        self._names = [
            [[name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups] for optimizer in optimizers
        ]
        self._check_saved()  # a checkpoint is restored before or after this, as the strategy has it
        self._optimizers, self._decays = optimizers, [_decays_of(optimizer) for optimizer in optimizers]
        self._rows = self._count(numbers, name_of)
        self._warn(numbers)

    def _check_saved(self) -> None:
        """Refuse groups of other parameters, which torch would take if there are as many, with the states exchanged."""
        moved = _moved(self._names, self._saved) if self._saved else []
        if moved:
            raise ValueError(
                f"The checkpoint has {', '.join(moved[:3])} ({len(moved)} in all) in other groups than "
                f"rules={self.rules!r} make. Resume with the rules that were saved, or load the weights alone "
                "(load_from_checkpoint)."
            )

    def _numbers(self, optimizers: Sequence[Optimizer], where: Mapping[int, Place]) -> dict[int, int]:
        """Of each parameter of the optimizers, by `id`, the number of its rule; that of all rules together for none."""
        numbers = {}
        for optimizer in optimizers:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                _check_parameter(optimizer, parameter, where)
                number = first_match(self.rules, where[id(parameter)])
                numbers[id(parameter)] = len(self.rules) if number is None else number
        return numbers

    def _apply(self, optimizer: Optimizer, numbers: Mapping[int, int], schedulers: Sequence[Any]) -> None:
        rules = list(self.rules.items())
        if optimizer not in _applied:
            factors = [*self.rules.values(), 1.0]
            multipliers = {parameter: factors[number] for parameter, number in numbers.items()}
            split_groups(optimizer, multipliers, list(dict.fromkeys([1.0, *factors])), schedulers)
            _applied[optimizer] = rules
        elif _applied[optimizer] != rules:
            raise ValueError(
                f"The weight decays of this {type(optimizer).__name__} have been multiplied by the rules "
                f"{dict(_applied[optimizer])!r}, and now rules={self.rules!r}. Make a new optimizer, or keep the rules."
            )

    def _count(self, numbers: Mapping[int, int], name_of: Mapping[int, str]) -> list[tuple[str, ...]]:
        """Rows of the table: one for each rule, and one for what none is about."""
        rows: list[tuple[str, ...]] = []
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        for number, (rule, multiplier) in enumerate([*self.rules.items(), (OTHERS, 1)]):
            members = [(p, group) for group in groups for p in group["params"] if numbers[id(p)] == number]
            decays = dict.fromkeys(f"{value:g}" for _, group in members for value in weight_decays(group).values())
            names = [name_of[id(parameter)] for parameter, _ in members]
            shown = ", ".join([*names[:NUM_NAMES], *(["..."] if len(names) > NUM_NAMES else [])])
            elements = sum(parameter.numel() for parameter, _ in members)
            label = rule if isinstance(rule, str) else rule.__name__
            rows.append((label, f"{multiplier:g}", ", ".join(decays), f"{len(names):,}", f"{elements:,}", shown))
        return rows

    def _warn(self, numbers: Mapping[int, int]) -> None:
        used = set(numbers.values())
        idle = [rule for number, rule in enumerate(self.rules) if number not in used]
        if idle:
            rank_zero_warn(
                f"No parameter falls under {', '.join(map(repr, idle))}: no name or module matches, or an earlier rule "
                "does. Correct the rule, or leave it out."
            )
        if not any(value for groups in self._decays for group in groups for value in group.values()):
            rank_zero_warn(
                f"All groups have a weight decay of 0 under rules={self.rules!r}. Give the optimizer a weight_decay "
                "that the rules can multiply."
            )


def _check_rule(rule: object, multiplier: object) -> None:
    if not (isinstance(rule, str) or (isinstance(rule, type) and issubclass(rule, nn.Module))):
        raise TypeError(f"rules has the key {rule!r}: give a pattern of names or a type of modules.")
    if isinstance(multiplier, bool) or not isinstance(multiplier, int | float):
        raise TypeError(f"rules[{rule!r}]={multiplier!r} is no number.")
    if not (isfinite(multiplier) and multiplier >= 0):
        raise ValueError(f"rules[{rule!r}]={multiplier!r} must be finite and at least 0; 0 is no weight decay.")


def _check_parameter(optimizer: Optimizer, parameter: Any, where: Mapping[int, Place]) -> None:
    kind = type(optimizer).__name__
    if id(parameter) not in where:
        raise ValueError(
            f"{kind} holds a tensor of shape {list(parameter.shape)} that is not a parameter of the module, so that "
            "WeightDecayRules has no name of it. Register it as one."
        )
    if isinstance(parameter, FlatParameter):
        raise ValueError(
            f"{kind} holds {where[id(parameter)].names[0]}, in which FSDP has joined parameters of several names. Set "
            "use_orig_params=True, or use strategy='hybrid_ptdp' with zero_stage=3."
        )


def _decays_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [weight_decays(group) for group in optimizer.param_groups]


def _moved(here: Sequence[Sequence[Sequence[str]]], there: Sequence[Sequence[Sequence[str]]]) -> list[str]:
    """Names that are in other groups in one of the two."""
    placed = [
        {(i, j, name): name for i, groups in enumerate(names) for j, group in enumerate(groups) for name in group}
        for names in (here, there)
    ]
    return list(
        dict.fromkeys(name for own in placed for place, name in own.items() if not all(place in one for one in placed))
    )
