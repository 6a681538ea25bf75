"""A whole model's state, as one process wrote it, put into what this rank holds of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.compat import reshapes_what_it_loads
from lightning_hybrid.optim.base import WholeTensorOptimizer
from lightning_hybrid.optim.transition import OptimizerTransition
from lightning_hybrid.parallel.checkpoint.saving import collapsed_of
from lightning_hybrid.parallel.checkpoint.states import Outline
from lightning_hybrid.parallel.checkpoint.stored import StoredState
from lightning_hybrid.parallel.engine import Engine
from lightning_hybrid.parallel.zero.shards import shard_like

# options that torch's schedulers and weight averaging add to groups, and what says which parameters a group has
SCHEDULED = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "params", "param_names"}

WAY_OUT = (
    "Resume with the optimizer that was saved and with its groups, which rules of weight decay make too, or load the "
    "weights alone (load_from_checkpoint)."
)


def load_model_state(engine: Engine, outline: Outline, state: Mapping[str, Any], *, strict: bool) -> None:
    """Load the part of a whole model's state that is on this rank.

    Args:
        engine: This rank's engine.
        outline: What the whole model saves, from before it was cut.
        state: The whole model's state.
        strict: Refuse a state whose names are not those of the model.

    Raises:
        RuntimeError: On all ranks, if names or shapes do not fit; nothing is loaded.
    """
    keys = outline.shapes
    missing, unexpected = [key for key in keys if key not in state], [key for key in state if key not in keys]
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"The checkpoint does not fit {type(engine.root).__name__}: it lacks {missing[:5]} ({len(missing)} keys) "
            f"and has {unexpected[:5]} ({len(unexpected)} keys) that the model has not. Load the checkpoint of the "
            "same model, or set strict_loading=False on the LightningModule."
        )
    _check_shapes(engine, outline, state)
    local = engine.root.state_dict()
    part = {key: _local(engine, key, state, local[key]) for key in local if key in state}
    engine.root.load_state_dict(part, strict=False)


class SavedOptimizer(Protocol):
    """What is saved of an optimizer's state."""

    def part(self, engine: Engine, optimizer: Optimizer, name: str, parameter: nn.Parameter) -> dict[str, Any] | None:
        """This rank's part of the state that an optimizer has for one parameter; None if it has none."""


class WholeOptimizer:
    """A `state_dict` over the whole model.

    Args:
        saved: It.
        names: Names of the parameters of each group.
    """

    def __init__(self, saved: Mapping[str, Any], names: Sequence[Sequence[str]]) -> None:
        self._by_name: dict[str, Any] = {}
        for group, members in zip(saved["param_groups"], names, strict=True):
            self._by_name |= {name: saved["state"].get(i) for i, name in zip(group["params"], members, strict=True)}

    def part(self, engine: Engine, optimizer: Optimizer, name: str, parameter: nn.Parameter) -> dict[str, Any] | None:
        """This rank's part of the state of one parameter, in its own memory: the whole may be a mapped file."""
        state = self._by_name.get(name)
        if state is None:
            return None
        parts = dict[str, tuple[Any, Any]]()
        for key, value in state.items():
            collapsed = collapsed_of(engine, optimizer, name, parameter, key)
            parts[key] = value, _part(engine, name, value, parameter, collapsed)
        return {key: p.clone() if p is whole and isinstance(p, Tensor) else p for key, (whole, p) in parts.items()}


def check_number(optimizers: Sequence[Optimizer], saved: Sequence[Any]) -> None:
    """Refuse states of more or fewer optimizers.

    Raises:
        ValueError: With both numbers.
    """
    if len(optimizers) != len(saved):
        raise ValueError(
            f"The checkpoint has states of {len(saved)} optimizer(s), and configure_optimizers has made "
            f"{len(optimizers)}. Resume with those that were saved, or load the weights alone (load_from_checkpoint)."
        )


def load_groups(
    optimizer: Optimizer, names: list[list[str]], saved: Sequence[Mapping[str, Any]], saved_names: Any
) -> None:
    """Take the options of an optimizer's groups: rates, decays.

    Args:
        optimizer: The optimizer over this rank's parameters.
        names: Parameters of each of its groups over the whole model.
        saved: The saved groups.
        saved_names: Names of the parameters of each; None where the order is the model's.

    Raises:
        ValueError: If they are not the optimizer's.
    """
    _check_groups(optimizer, names, saved, saved_names or names)
    states = optimizer.state_dict()
    for group, old in zip(states["param_groups"], saved, strict=True):
        group |= {key: value for key, value in old.items() if key not in ("params", "param_names")}
    optimizer.load_state_dict(states)


def load_optimizer_state(engine: Engine, optimizer: Optimizer, saved: SavedOptimizer) -> None:
    """Load the part of an optimizer's state that belongs to this rank's parameters.

    Args:
        engine: This rank's engine.
        optimizer: The optimizer over this rank's parameters; its groups are loaded.
        saved: Its state over the whole model.
    """
    name_of = {id(parameter): name for name, parameter in engine.named_parameters().items()}
    states = dict[int, Any]()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        state = saved.part(engine, optimizer, name_of[id(parameter)], parameter)
        if state is not None:
            states[index] = state
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
    for index, state in states.items():
        _keep_types(parameters[index], optimizer.state[parameters[index]], state)


def _keep_types(parameter: nn.Parameter, loaded: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Numbers beside a parameter, such as NAdam's products, have types of their own; torch gives them its type."""
    for entry, value in saved.items():
        if isinstance(value, Tensor) and value.shape != parameter.shape and loaded[entry].dtype != value.dtype:
            loaded[entry] = value.to(loaded[entry].device)


def _local(engine: Engine, key: str, state: Mapping[str, Any], like: Any) -> Any:
    """What this rank holds of a state's entry."""
    part = state.part(engine, key, like) if isinstance(state, StoredState) else None
    return _part(engine, key, state[key], like) if part is None else part


def _part(engine: Engine, name: str, value: Any, like: Any, collapsed: frozenset[int] = frozenset()) -> Any:
    """This rank's slice over the tensor or the expert axis, and of that its shard over the data axis."""
    share = engine.share(name)
    if share is None or share.split.dim not in collapsed:
        value = engine.part(name, value)
    return shard_like(value, like, collapsed=collapsed)


def _check_shapes(engine: Engine, outline: Outline, state: Mapping[str, Any]) -> None:
    """Refuse parameters of other shapes: only some ranks have them, and what is as long as a slice would be taken."""
    hooked = reshapes_what_it_loads(engine.root)  # then only slices must be known
    for name, (wanted, _) in ((name, spec) for name, spec in outline.shapes.items() if spec and name in state):
        if name not in outline.parameters or (hooked and engine.share(name) is None):
            continue
        found = state.shape(name) if isinstance(state, StoredState) else getattr(state[name], "shape", None)
        if found is not None and tuple(found) != wanted:
            raise RuntimeError(
                f"The checkpoint does not fit {type(engine.root).__name__}: {name} has shape {list(found)} there and "
                f"{list(wanted)} in the model. Load the checkpoint of the same model."
            )


def _check_groups(
    optimizer: Optimizer, names: list[list[str]], saved: Sequence[Mapping[str, Any]], wanted: Sequence[Sequence[str]]
) -> None:
    found = [len(group["params"]) for group in saved]
    here = [len(members) for members in names]
    known = {name for members in names for name in members}
    strange = [name for members in wanted for name in members if name not in known]
    other = _other_kind(optimizer, saved[0]) if saved else None
    if other is not None:
        half, kind, options = other
        raise ValueError(
            f"The checkpoint's {half}optimizer has the options {sorted(options)} and is no {kind}. Resume with the "
            "optimizer that was saved, or load the weights alone (load_from_checkpoint)."
        )
    if found != here or strange:
        raise ValueError(
            f"The checkpoint's {type(optimizer).__name__} has groups of {found} parameters and the present one has "
            f"{here}{f', without {strange[:3]}' if strange else ''}. {WAY_OUT}"
        )
    old_groups = map(set, wanted)
    moved = [name for old, members in zip(old_groups, names, strict=True) for name in members if name not in old]
    if moved:
        raise ValueError(
            f"The checkpoint's {type(optimizer).__name__} has {moved[:3]} ({len(moved)} in all) in other groups, which "
            f"have options of their own. {WAY_OUT}"
        )


def _other_kind(optimizer: Optimizer, saved: Mapping[str, Any]) -> tuple[str, str, set[str]] | None:
    """Of a saved group of another class: which half of a transition is, what it is not, and its options."""
    name, options = type(optimizer).__name__, saved.keys() - {"params", "param_names"}
    if isinstance(optimizer, OptimizerTransition) and "first_lr" in saved:
        for half, (each, own) in zip(("first ", "second "), optimizer.inner_options(saved), strict=True):
            if _are_other_options(each, own):
                return half, type(each).__name__, set(own)
        return None
    return ("", name, set(options)) if _are_other_options(optimizer, saved) else None


def _are_other_options(optimizer: Optimizer, saved: Mapping[str, Any]) -> bool:
    if isinstance(optimizer, OptimizerTransition):
        return any(_are_other_options(each, own) for each, own in optimizer.inner_options(saved))
    here = optimizer.param_groups[0].keys()
    less = (optimizer.defaults.keys() & here) - saved.keys()  # torch adds to defaults when it loads
    more = saved.keys() - here - SCHEDULED
    if isinstance(optimizer, WholeTensorOptimizer) or not saved:  # SM3's options are a part of SGD's and of others
        return bool(less or more)
    if "foreach" in less and type(optimizer).__module__.startswith("torch.optim."):  # all of torch's have it
        return True
    return bool(less and more)  # a later version only has more
