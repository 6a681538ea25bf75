"""What a style does to a module, and whether the module can take it."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lightning_hybrid.functional.splits import Split
from lightning_hybrid.parallel.tensor.assignment import Assignment
from lightning_hybrid.parallel.tensor.planning.attentions import sections
from lightning_hybrid.parallel.tensor.planning.heads import Heads
from lightning_hybrid.parallel.tensor.planning.outline import Matrix, Outline, odd_lookup, own_parameters, parent

_LINEAR = "an nn.Linear or a Conv1D of transformers, with a weight of its own"


def assign(outline: Outline, name: str, style: str, heads: Heads | None = None) -> Assignment:
    """A module with its style.

    Args:
        outline: The model.
        name: The module's, dotted.
        style: One of `STYLES`.
        heads: Those of the attention that it makes queries, keys and values for, if they are known.

    Raises:
        ValueError: If the module cannot take the style, or its sizes do not divide.
    """
    if style == "fused_qkv":
        return Assignment(name, style, _fused_qkv(outline, name, heads))
    return Assignment(name, style, _SPLITS[style](outline, name))


def _colwise(outline: Outline, name: str) -> dict[str, Split]:
    found = _linear(outline, name, "colwise")
    _check_multiple(outline, name, "out_features", found.outputs)
    return _by_outputs(found, (found.outputs,))


def _fused_qkv(outline: Outline, name: str, heads: Heads | None) -> dict[str, Split]:
    found = _linear(outline, name, "fused_qkv")
    parts = sections(outline, name, heads)
    if parts is None:
        counted = f"{heads.query} query and twice {heads.key_value} key-value heads" if heads else "three equal parts"
        raise ValueError(
            f"{name} has out_features={found.outputs}, which are not {counted}, as the style 'fused_qkv' needs. Give "
            "it 'colwise' or 'replicated' in tensor_parallel_plan."
        )
    for part in parts[:2]:
        _check_multiple(outline, name, "a section of queries, keys or values of", part)
    return _by_outputs(found, parts)


def _fused_gate_up(outline: Outline, name: str) -> dict[str, Split]:
    found = _linear(outline, name, "fused_gate_up")
    _check_multiple(outline, name, "out_features", found.outputs, halves=2)
    return _by_outputs(found, (found.outputs // 2, found.outputs // 2))


def _rowwise(outline: Outline, name: str) -> dict[str, Split]:
    found = _linear(outline, name, "rowwise")
    _check_multiple(outline, name, "in_features", found.inputs)
    return {"weight": Split(1 - found.out_dim, (found.inputs,))}


def _vocab(outline: Outline, name: str) -> dict[str, Split]:
    module = outline.modules[name]
    if isinstance(module, nn.Embedding) and odd_lookup(module):
        raise ValueError(
            f"{name} has {odd_lookup(module)}, with which its rows cannot be dealt out: make it without, or leave it "
            "out of tensor_parallel_plan."
        )
    found = outline.matrix(name)
    if isinstance(module, nn.Embedding) and "weight" in own_parameters(module):
        found = Matrix(module.embedding_dim, module.num_embeddings, 0, biased=False)
    if found is None or found.out_dim:
        raise _cannot(outline, name, "vocab", "an nn.Embedding or nn.Linear, with a weight of its own")
    if found.outputs < outline.size:
        raise ValueError(
            f"{name} has {found.outputs} rows, fewer than tensor_parallel_size={outline.size}: leave it out of "
            "tensor_parallel_plan."
        )
    return _by_outputs(found, (found.outputs,))


def _heads(outline: Outline, name: str) -> dict[str, Split]:
    module = outline.modules[name]
    if not isinstance(module, nn.MultiheadAttention):
        raise _cannot(outline, name, "heads", "an nn.MultiheadAttention")
    if module.bias_k is not None:
        raise ValueError(
            f"{name} has bias_k and bias_v, which the style 'heads' does not split. Make it with add_bias_kv=False, or "
            "give it 'replicated' in tensor_parallel_plan."
        )
    width, own = module.embed_dim, own_parameters(module)
    thirds, one = Split(0, (width,) * 3), Split(0, (width,))
    splits = {"in_proj_weight": thirds, "in_proj_bias": thirds}
    splits |= {"q_proj_weight": one, "k_proj_weight": one, "v_proj_weight": one}
    return {**{n: split for n, split in splits.items() if n in own}, "out_proj.weight": Split(1, (width,))}


def _sequence(outline: Outline, name: str) -> dict[str, Split]:
    if not own_parameters(outline.modules[name]):
        raise _cannot(outline, name, "sequence", "a module with parameters of its own")
    return {}


def _replicated(outline: Outline, name: str) -> dict[str, Split]:
    return {}


_SPLITS: dict[str, Callable[[Outline, str], dict[str, Split]]] = {
    "colwise": _colwise,
    "fused_gate_up": _fused_gate_up,
    "rowwise": _rowwise,
    "vocab": _vocab,
    "heads": _heads,
    "sequence": _sequence,
    "replicated": _replicated,
}


def _by_outputs(found: Matrix, parts: tuple[int, ...]) -> dict[str, Split]:
    splits = {"weight": Split(found.out_dim, parts)}
    return {**splits, "bias": Split(0, parts)} if found.biased else splits


def _linear(outline: Outline, name: str, style: str) -> Matrix:
    found = outline.matrix(name)
    if isinstance(outline.modules[parent(name)], nn.MultiheadAttention):
        raise ValueError(
            f"{name} belongs to an nn.MultiheadAttention, which is split as one: give {parent(name)} the style 'heads' "
            f"in tensor_parallel_plan, instead of {style!r} to {name}."
        )
    if found is None:
        raise _cannot(outline, name, style, _LINEAR)
    return found


def _cannot(outline: Outline, name: str, style: str, needed: str) -> ValueError:
    kind = type(outline.modules[name]).__name__
    return ValueError(
        f"tensor_parallel_plan gives {name or 'the model'} ({kind}) the style {style!r}, which is for {needed}. "
        "Choose another style, or a pattern that does not match it."
    )


def _check_multiple(outline: Outline, name: str, what: str, length: int, halves: int = 1) -> None:
    if length % (halves * outline.size):
        twice = "twice " if halves == 2 else ""
        raise ValueError(
            f"{name} has {what}={length}, no multiple of {twice}tensor_parallel_size={outline.size}. Choose a size "
            "that divides it, or leave the module out of tensor_parallel_plan."
        )
