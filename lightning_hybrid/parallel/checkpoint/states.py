"""A model and its optimizers as parts under the names of the unmodified module, and back."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_hybrid.optim.base import new_state
from lightning_hybrid.parallel.checkpoint.parts import Part, part_of, shard_rows
from lightning_hybrid.parallel.checkpoint.saving import collapsed_of, owns, saves
from lightning_hybrid.parallel.engine import Engine
from lightning_hybrid.parallel.tensor.parallel import whole_tree
from lightning_hybrid.parallel.zero.sharding import Sharded

MODEL, OPTIMIZER = "model.", "optimizer."


@dataclass(frozen=True)
class Outline:
    """What a whole model saves, noted before it is cut.

    Attributes:
        shapes: Of each state key that is a tensor, shape and type; of any other, None. In the model's order.
        parameters: State keys of parameters, second names too.
        tied: First key of each key whose tensor has another one before.
        is_plain: All tensors are the module's parameters and buffers, under their own names.
    """

    shapes: dict[str, tuple[tuple[int, ...], torch.dtype] | None]
    parameters: frozenset[str]
    tied: dict[str, str]
    is_plain: bool

    @classmethod
    def of(cls, root: nn.Module) -> Outline:
        """That of a module which is whole."""
        state = root.state_dict(keep_vars=True)
        shapes = {k: (tuple(v.shape), v.dtype) if isinstance(v, Tensor) else None for k, v in state.items()}
        first: dict[int, str] = {}
        tied = {k: first[id(v)] for k, v in state.items() if isinstance(v, Tensor) and first.setdefault(id(v), k) != k}
        named = dict(root.named_parameters(remove_duplicate=False))
        known = named | dict(root.named_buffers(remove_duplicate=False))
        is_plain = all(known.get(k) is v for k, v in state.items() if isinstance(v, Tensor))
        return cls(shapes, frozenset(named), tied, is_plain)

    def first(self, name: str) -> str:
        """The first name of a parameter."""
        return self.tied.get(name, name)


def model_parts(engine: Engine, outline: Outline) -> tuple[dict[str, Part], dict[str, Any]]:
    """What this rank has to save of the model: tensors by `model.` and their key, and whatever else its state has.

    Raises:
        RuntimeError: If a hook of `state_dict` has made tensors that cannot be put together.
    """
    state = engine.root.state_dict()  # first: it lets go of gathered parameters, into which views of shards may point
    parts: dict[str, Part] = {}
    for name, parameter in engine.named_parameters().items():
        key = outline.first(name)
        if key in outline.shapes and _keeps(engine, name, parameter):
            parts[MODEL + key] = _part(engine, name, parameter)
    others: dict[str, Any] = {}
    for key, value in state.items():
        if key in outline.parameters or key not in outline.shapes or not saves(engine, key):
            continue
        value = whole_tree(value)  # a block may have kept parts of activations; all ranks of the axis come here
        if isinstance(value, Tensor):
            _check(engine, outline, key, value)  # on all replicas: none waits for one that refuses
        if engine.mesh.data_rank or engine.mesh.tensor_rank or key in outline.tied:
            continue
        if isinstance(value, Tensor):
            parts[MODEL + key] = part_of(value)
        else:
            others[key] = value
    return parts, others


def optimizer_parts(
    engine: Engine, optimizer: Optimizer, index: int, outline: Outline
) -> tuple[dict[str, Part], dict[str, dict[str, Any]]]:
    """What this rank has to save of an optimizer's state: tensors, and other values by parameter and entry.

    Tensors of a parameter's shape are cut as it is, and so are factors of it along what they have of its dimensions;
    others, such as step counts, are whole on every rank.
    """
    parts: dict[str, Part] = {}
    others: dict[str, dict[str, Any]] = {}
    for name, parameter in engine.named_parameters().items():
        if parameter not in optimizer.state or not owns(engine, name):
            continue
        key = outline.first(name)
        for entry, value in optimizer.state[parameter].items():
            if not isinstance(value, Tensor):
                others.setdefault(key, {})[entry] = value
            elif "." in entry:
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {entry!r} of {key}: names of saved states must have no dot."
                )
            else:
                split = engine.deals_out(
                    name, parameter, value, collapsed_of(engine, optimizer, name, parameter, entry)
                )
                if _keeps(engine, name, value, split=split):
                    parts[f"{OPTIMIZER}{index}.{key}.{entry}"] = _part(engine, name, value, split=split)
    return parts, others


def gather_others(engine: Engine, mine: dict[str, Any]) -> dict[str, Any]:
    """What the first replica's ranks have that is no tensor, together on world rank 0; every rank must call it."""
    mesh = engine.mesh
    if mesh.data_rank > 0 or mesh.tensor_rank > 0:
        return {}
    everyone: list[Any] | None = [None] * mesh.layout.pipeline if mesh.rank == 0 else None
    dist.gather_object(mine, everyone, dst=0, group=mesh.pipeline_group)
    return {name: value for part in everyone or [] for name, value in part.items()}


def new_part(
    engine: Engine,
    name: str,
    like: Tensor,
    dtype: torch.dtype | None = None,
    collapsed: frozenset[int] = frozenset(),
) -> tuple[Tensor, Part]:
    """A tensor in which this rank's part of a value of a parameter's shape can be read, and that part.

    Args:
        engine: This rank's engine.
        name: The parameter's, as this rank knows it.
        like: The parameter.
        dtype: Type of the value; None takes the parameter's.
        collapsed: Dimensions that have length 1 in it.
    """
    tensor = new_state(like.detach(), collapsed, dtype)
    return tensor, _part(engine, name, tensor, split=engine.deals_out(name, like, tensor, collapsed))


def _part(engine: Engine, name: str, tensor: Tensor, *, split: bool = True) -> Part:
    share = engine.share(name) if split else None
    return part_of(tensor) if share is None else part_of(tensor, *share)


def _keeps(engine: Engine, name: str, value: Tensor, *, split: bool = True) -> bool:
    """Whether this rank writes what it has of a value: of those that have the same, each writes some.

    Args:
        engine: This rank's engine.
        name: The parameter's, as this rank knows it.
        value: The parameter, or one of its state.
        split: An axis deals it out if it does so with the parameter.
    """
    if not owns(engine, name):
        return False
    mesh, number = engine.mesh, zlib.crc32(name.encode())
    layout = mesh.layout
    sharded = isinstance(value, DTensor) and isinstance(engine.data, Sharded) and shard_rows(value) is not None
    peers = engine.peers(name) if split else mesh.dense
    rank, ranks = (peers.copy, peers.replicate) if sharded else (peers.rank, peers.size)
    if engine.tensor is None or (split and name in engine.tensor.splits):
        return number % ranks == rank
    return number % (ranks * layout.tensor) == rank * layout.tensor + mesh.tensor_rank


def _check(engine: Engine, outline: Outline, key: str, value: Tensor) -> None:
    expected = outline.shapes[key]
    if isinstance(value, DTensor) or expected is None or tuple(value.shape) != expected[0]:
        raise RuntimeError(
            f"{key} is in the state of {type(engine.root).__name__} as something else than a parameter or a buffer: a "
            "state_dict hook makes it of what this rank has, a part. Leave the hook out, or save full files of one "
            "process."
        )
