"""Finds attention layers by the names and shapes of their projections."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from lightning_hybrid.parallel.tensor.planning.heads import Heads, find_heads
from lightning_hybrid.parallel.tensor.planning.outline import Outline, last, parent, within

_FILLERS = {"proj", "projection", "lin", "linear", "layer", "to", "w", "dense", "attn", "attention", "self", "c"}
_ROLES = {
    **dict.fromkeys(("q", "wq", "query", "queries"), "query"),
    **dict.fromkeys(("k", "wk", "key", "keys"), "key"),
    **dict.fromkeys(("v", "wv", "value", "values"), "value"),
    **dict.fromkeys(("qkv", "wqkv", "kqv", "in", "query_key_value", "q_k_v"), "fused"),
    **dict.fromkeys(("o", "wo", "out", "output", "unify", "unifyheads"), "output"),
}
_WHOLE_NAMES = {"proj": "output", "dense": "output", "c_proj": "output", "c_attn": "fused"}
INTERLEAVED = "query_key_value"  # the three parts of each head lie together: GPT-NeoX, BLOOM, Falcon
_WAYS_IN = {"query", "key", "value", "fused"}


def role(name: str) -> str:
    """What a projection's name says that it makes: query, key, value, fused, output, or nothing."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", last(name)).lower()
    if name in _WHOLE_NAMES:
        return _WHOLE_NAMES[name]
    return _ROLES.get("_".join(word for word in name.split("_") if word not in _FILLERS), "")


@dataclass(frozen=True)
class Attention:
    """One attention layer.

    Attributes:
        holder: Dotted name of the module that holds its projections, or is an `nn.MultiheadAttention`.
        styles: Style of each of its modules that can be split, by dotted name.
        inputs: Those of them that make queries, keys and values.
        heads: Its numbers of heads, or None if nothing tells.
        reason: Why it cannot be split without a gather, or nothing.
    """

    holder: str
    styles: dict[str, str] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    heads: Heads | None = None
    reason: str = ""


def find_attentions(outline: Outline) -> list[Attention]:
    """All of them, in registration order."""
    found = []
    for name, module in outline.modules.items():
        if isinstance(module, nn.MultiheadAttention):
            found.append(_multihead(name, module))
        elif attention := _projections(outline, name):
            found.append(attention)
    return found


def sections(outline: Outline, name: str, heads: Heads | None) -> tuple[int, ...] | None:
    """Lengths of queries, keys and values in a fused projection's outputs, or None if they do not fit."""
    found = outline.known_matrix(name)
    parts = heads.query + 2 * heads.key_value if heads else 3
    query, key = (heads.query, heads.key_value) if heads else (1, 1)
    if found.outputs % parts:
        return None
    unit = found.outputs // parts
    return (query * unit, key * unit, key * unit)


def _multihead(name: str, module: nn.MultiheadAttention) -> Attention:
    heads = Heads(module.num_heads, module.num_heads)
    reason = "bias_k and bias_v are no matrices of heads" if module.bias_k is not None else ""
    return Attention(name, {name: "heads"}, (name,), heads, reason)


def _projections(outline: Outline, name: str) -> Attention | None:
    roles: dict[str, list[str]] = {}
    for child in outline.matrices(name):
        roles.setdefault(role(child), []).append(child)
    ways = {way: children[0] for way, children in roles.items() if len(children) == 1 and way in _WAYS_IN}
    if {"query", "key", "value"} <= ways.keys():
        return _separate(outline, name, [ways["query"], ways["key"], ways["value"]])
    return _fused(outline, name, ways["fused"]) if set(ways) == {"fused"} else None


def _separate(outline: Outline, name: str, inputs: Sequence[str]) -> Attention:
    query, key, value = (outline.known_matrix(each) for each in inputs)
    heads = find_heads(outline, name, query=query.outputs, key=key.outputs)
    styles = dict.fromkeys(inputs, "colwise")
    if heads is None:
        return Attention(name, styles, tuple(inputs), None, "its number of heads is not known, as num_heads would tell")
    whole = query.outputs % heads.query == key.outputs % heads.key_value == value.outputs % heads.key_value == 0
    if not whole:
        return Attention(name, styles, tuple(inputs), heads, "its projections are no multiples of its heads")
    width = value.outputs // heads.key_value * heads.query
    output = _find_output(outline, name, width, set(inputs))
    if output is None:
        return Attention(name, styles, tuple(inputs), heads, f"no output projection of {width} features was found")
    return Attention(name, {**styles, output: "rowwise"}, tuple(inputs), heads)


def _fused(outline: Outline, name: str, fused: str) -> Attention | None:
    found = outline.known_matrix(fused)
    heads = find_heads(outline, name, query=found.outputs, key=None)
    parts = sections(outline, fused, heads)
    if parts is None or (heads is None and found.outputs != 3 * found.inputs) or (heads and parts[0] % heads.query):
        return None
    output = _find_output(outline, name, parts[0], {fused})
    if output is None and last(fused) == "in_proj":  # a name of other things, too
        return None
    style = "colwise" if last(fused) == INTERLEAVED else "fused_qkv"
    if heads is None:
        return Attention(
            name, {fused: style}, (fused,), None, "its number of heads is not known, as num_heads would tell"
        )
    if output is None:
        return Attention(
            name, {fused: style}, (fused,), heads, f"no output projection of {parts[0]} features was found"
        )
    return Attention(name, {fused: style, output: "rowwise"}, (fused,), heads)


def _find_output(outline: Outline, name: str, width: int, taken: set[str]) -> str | None:
    """The projection behind the heads: beside the others, in a container there, or beside what holds them (BERT)."""
    fitting = [child for child in _linears(outline, name) if child not in taken and _takes(outline, child, width)]
    named = [child for child in fitting if _says_output(outline, child, name)]
    if named or (len(fitting) == 1 and parent(fitting[0]) == name and name not in outline.scopes):
        return (named or fitting)[0]
    around = parent(name)
    if named or not name or name in outline.scopes:
        return None
    beside = [
        inner
        for child in outline.children(around)
        if child != name
        for inner in outline.inside(child)
        if _takes(outline, inner, width) and _says_output(outline, inner, around)
    ]
    return beside[0] if len(beside) == 1 and around not in outline.scopes else None


def _linears(outline: Outline, name: str) -> list[str]:
    """Linear layers of a module, with the first of each list in it, as of `to_out = Sequential(Linear, Dropout)`."""
    found = []
    for child in outline.children(name):
        if outline.matrix(child):
            found.append(child)
        elif isinstance(outline.modules[child], nn.Sequential | nn.ModuleList):
            found += outline.matrices(child)[:1]
    return found


def _says_output(outline: Outline, name: str, around: str) -> bool:
    """Whether the module's name, or that of what holds it below `around`, is one of output projections."""
    holder = parent(name)
    return role(name) == "output" or (holder != around and within(holder, around) and role(holder) == "output")


def _takes(outline: Outline, name: str, width: int) -> bool:
    found = outline.matrix(name)
    return found is not None and found.inputs == width
