"""A whole model's state, as one process wrote it, put into what this rank holds of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_hybrid.parallel.engine import Engine
from lightning_hybrid.parallel.zero.shards import shard_like


def load_model_state(engine: Engine, keys: Sequence[str], state: Mapping[str, Any], *, strict: bool) -> None:
    """Load the part of a whole model's state that is on this rank.

    Args:
        engine: This rank's engine.
        keys: The whole model's state keys, from before it was cut.
        state: The whole model's state.
        strict: Refuse a state whose names are not those of the model.

    Raises:
        RuntimeError: If names or shapes do not fit.
    """
    missing, unexpected = [key for key in keys if key not in state], [key for key in state if key not in set(keys)]
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"The checkpoint does not fit {type(engine.root).__name__}: it lacks {missing[:5]} ({len(missing)} keys) "
            f"and has {unexpected[:5]} ({len(unexpected)} keys) that the model has not. Load the checkpoint of the "
            "same model, or set strict_loading=False on the LightningModule."
        )
    local = engine.root.state_dict()
    part = {key: _part(engine, key, state[key], local[key]) for key in local if key in state}
    _check_slices(engine, state, local)
    engine.root.load_state_dict(part, strict=False)


def load_optimizer_state(
    engine: Engine, optimizer: Optimizer, names: list[list[str]], saved: Mapping[str, Any], saved_names: Any
) -> None:
    """Load the part of a whole optimizer's state that belongs to this rank's parameters.

    Args:
        engine: This rank's engine.
        optimizer: The optimizer over this rank's parameters.
        names: Parameters of each of its groups over the whole model.
        saved: Its `state_dict` over the whole model.
        saved_names: Names of the parameters of each saved group; None where the order is the model's.

    Raises:
        ValueError: If the saved groups are not the optimizer's.
    """
    wanted = saved_names or names
    _check_groups(optimizer, names, saved["param_groups"], wanted)
    by_name: dict[str, Any] = {}
    for group, members in zip(saved["param_groups"], wanted, strict=True):
        by_name |= {name: saved["state"].get(i) for i, name in zip(group["params"], members, strict=True)}
    name_of = {id(parameter): name for name, parameter in engine.named_parameters().items()}
    states, groups, number = dict[int, Any](), list[dict[str, Any]](), 0
    for group, old in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        options = {key: value for key, value in old.items() if key not in ("params", "param_names")}
        own_names = {"param_names": group["param_names"]} if "param_names" in group else {}
        held = range(number, number + len(group["params"]))
        groups.append({**options, **own_names, "params": list(held)})
        for index, parameter in zip(held, group["params"], strict=True):
            name = name_of[id(parameter)]
            state = by_name.get(name)
            if state is not None:
                states[index] = {key: _part(engine, name, value, parameter) for key, value in state.items()}
        number += len(held)
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def _part(engine: Engine, name: str, value: Any, like: Any) -> Any:
    """This rank's slice over the tensor axis, and of that its shard over the data axis."""
    return shard_like(value if engine.tensor is None else engine.tensor.part(name, value), like)


def _check_slices(engine: Engine, state: Mapping[str, Any], local: Mapping[str, Any]) -> None:
    """Refuse tensors of another length: one that is as long as a slice would else be taken for the slice."""
    splits = engine.tensor.splits if engine.tensor is not None else {}
    for name in (name for name in splits if name in state and name in local):
        found, wanted = tuple(state[name].shape), splits[name].whole_shape(local[name].shape)
        if found != wanted:
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
    if found != here or strange:
        raise ValueError(
            f"The checkpoint's {type(optimizer).__name__} has groups of {found} parameters and the present one has "
            f"{here}{f', without {strange[:3]}' if strange else ''}. Resume with the optimizer that was saved, or load "
            "the weights alone (load_from_checkpoint)."
        )
