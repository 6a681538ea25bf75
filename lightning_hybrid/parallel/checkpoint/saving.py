"""The whole model's state on one rank, under the names of the unmodified module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_hybrid.optim.base import collapsed_dims
from lightning_hybrid.parallel.engine import Engine
from lightning_hybrid.parallel.tensor.parallel import whole_tree


def gather_model_state(engine: Engine, keys: list[str]) -> dict[str, Any]:
    """State of the whole model on world rank 0, empty elsewhere; every rank must call it.

    Args:
        engine: This rank's engine.
        keys: The whole model's state keys in order, from before it was cut.

    Raises:
        RuntimeError: If a key is found on no rank.
    """
    local = engine.root.state_dict()
    wanted = set(keys)
    mine = {
        key: _gathered(engine, key, local[key], split=engine.deals_out(key, local[key], local[key]))
        for key in local
        if key in wanted and saves(engine, key)
    }
    parts = _collect(engine, mine)
    if parts is None:
        return {}
    state = {key: value for part in parts for key, value in part.items()}
    shared = [engine.cut.names_of(name) for name in set(engine.cut.aliases.values())] if engine.cut else []
    for known in shared:
        value = next(
            (state[other] for other in known if other in state), None
        )  # an owner may know the second name only
        state |= {other: value for other in known if other in keys and value is not None}
    missing = [key for key in keys if key not in state]
    if missing:
        raise RuntimeError(
            f"No rank has {missing[:5]} ({len(missing)} of {len(keys)} keys); the checkpoint would be incomplete."
        )
    return {key: state[key] for key in keys}


def gather_optimizer_state(
    engine: Engine, optimizer: Optimizer, names: list[list[str]], given: list[list[str] | None]
) -> dict[str, Any]:
    """An optimizer's state as one process would have it, on world rank 0; every rank must call it.

    Args:
        engine: This rank's engine.
        optimizer: The optimizer over this rank's parameters.
        names: Parameters of each group over the whole model.
        given: The names that the optimizer itself knows them by, if it does.
    """
    mine: dict[str, dict[str, Any]] = {}
    for name, parameter in engine.named_parameters().items():
        if parameter in optimizer.state and owns(engine, name):
            mine[name] = {}
            for entry, value in optimizer.state[parameter].items():
                split = engine.deals_out(
                    name, parameter, value, collapsed_of(engine, optimizer, name, parameter, entry)
                )
                mine[name][entry] = _gathered(engine, name, value, split=split)
    parts = _collect(engine, mine)
    if parts is None:
        return {}
    found = {name: state for part in parts for name, state in part.items()}
    order = [name for group in names for name in group]
    state = {i: found[name] for i, name in enumerate(order) if name in found}
    return {"state": state, "param_groups": saved_groups(optimizer, names, given)}


def collapsed_of(engine: Engine, optimizer: Optimizer, name: str, parameter: Tensor, entry: str) -> frozenset[int]:
    """Dimensions of a parameter that an optimizer's state of it has with length 1."""
    share = engine.share(name)
    shape = tuple(parameter.shape) if share is None else share.split.whole_shape(parameter.shape)
    return collapsed_dims(optimizer, entry, shape)


def saved_groups(optimizer: Optimizer, names: list[list[str]], given: list[list[str] | None]) -> list[dict[str, Any]]:
    """Options of an optimizer's groups, with the numbers of their parameters over the whole model."""
    groups, start = [], 0
    for group, members, own_names in zip(optimizer.param_groups, names, given, strict=True):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        indices = list(range(start, start + len(members)))
        named = {} if own_names is None else {"param_names": list(own_names)}
        groups.append({**options, "params": indices, **named})
        start += len(members)
    return groups


def _gathered(engine: Engine, name: str, value: Any, *, split: bool) -> Any:
    """A value over the data axis and then over the tensor axis, in host memory where it is collected; None elsewhere.

    Args:
        engine: This rank's engine.
        name: A parameter's, or any other state key.
        value: The parameter itself, or an entry of its state.
        split: An axis deals it out.
    """
    if isinstance(value, DTensor):
        value = value.to(engine.mesh.device)  # shards may live in host memory, where the group does not communicate
    value = whole(whole_tree(value))  # a block may have kept parts of activations in a buffer
    if engine.experts is not None and split:
        value = whole(engine.experts.whole(name, value))
    if engine.mesh.data_rank > 0:  # other replicas only take part in the gathering over the data axis
        return None
    if engine.tensor is not None and split:
        value = whole(engine.tensor.whole(name, value, engine.mesh.device))
    return value if engine.mesh.tensor_rank == 0 else None


def whole(value: Any) -> Any:
    """A tensor in host memory, gathered if it is sharded; anything else as it is."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _collect(engine: Engine, mine: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """Parts of the ranks of the first replica, on world rank 0 one after the other; None elsewhere."""
    mesh = engine.mesh
    if mesh.data_rank > 0 or mesh.tensor_rank > 0:
        return None
    if mesh.rank > 0:
        dist.send_object_list([mine], dst=0, group=mesh.pipeline_group)
        return None
    return [mine, *(_receive(engine, source) for source in mesh.pipeline_ranks[1:])]


def _receive(engine: Engine, source: int) -> Mapping[str, Any]:
    box: list[Any] = [None]
    dist.recv_object_list(box, src=source, group=engine.mesh.pipeline_group)
    part: Mapping[str, Any] = box[0]
    return part


def owns(engine: Engine, name: str) -> bool:
    """Whether this pipeline rank is the one of its holders that saves a parameter which is here."""
    if engine.cut is None:
        return True
    if engine.ownership is None:
        return (name in engine.cut.outside and engine.mesh.pipeline_rank == 0) or name not in engine.cut.outside
    return engine.ownership.owner(name) == engine.mesh.pipeline_rank


def saves(engine: Engine, key: str) -> bool:
    """Whether this rank's value of a state key is the one to keep."""
    cut = engine.cut
    if cut is None:
        return True
    name = cut.aliases.get(key, key)
    if name in cut.parameters:
        return owns(engine, name)
    position = next((i for i, block in enumerate(cut.blocks) if key.startswith(f"{block}.")), None)
    if position is not None:
        return cut.stage_of_block(position) in cut.stages
    return engine.mesh.pipeline_rank == _rank_of_buffer(engine, key)


def _rank_of_buffer(engine: Engine, key: str) -> int:
    """The pipeline rank whose value of a buffer is true: others may have computed it from empty tensors."""
    writers = engine.ownership.writers if engine.ownership is not None else {}
    return next((rank for name, rank in writers.items() if key == name or key.startswith(f"{name}.")), 0)
