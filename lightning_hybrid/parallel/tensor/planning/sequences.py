"""What sequence parallelism adds to a plan: modules between the split ones work on a shard of the sequence.

Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from lightning_hybrid.parallel.tensor.assignment import Assignment
from lightning_hybrid.parallel.tensor.planning.attentions import Attention, role
from lightning_hybrid.parallel.tensor.planning.outline import Outline, is_norm, last, own_parameters, parent, within

_COLUMNS = ("colwise", "fused_qkv", "fused_gate_up")
_ON_HEADS = "works on shards of heads or features: its gradients are whole"
_OUTSIDE = "lies outside the blocks, where the sequence is whole"


def with_sequence(
    outline: Outline, assignments: dict[str, Assignment], attentions: Sequence[Attention]
) -> dict[str, Assignment]:
    """The plan with norms on sequence shards, late sums for whole parameters, and whole modules that mix positions."""
    found = {name: _checked(outline, assignments, given) for name, given in assignments.items()}
    holders = {attention.holder for attention in attentions}
    split = {name for name, given in found.items() if given.splits}
    for block in outline.blocks:
        for name in _visited(outline, found, block):
            if name not in found and (added := _added(outline, found, split, name, is_attention=name in holders)):
                found[added.module] = added
    whole = [name for name, given in found.items() if given.style == "replicated"]
    inner = {name for name in found for other in whole if name != other and within(name, other)} - split
    return {name: given for name, given in found.items() if name not in inner}


def _checked(outline: Outline, assignments: dict[str, Assignment], given: Assignment) -> Assignment:
    """An assignment with the parameters whose gradients are summed late."""
    own = own_parameters(outline.modules[given.module])
    if _is_routed(outline, given.module):
        return given
    if given.style == "sequence":
        if outline.block_of(given.module) is None:
            return replace(given, note=_OUTSIDE)
        between = _is_between(outline, assignments, given.module)
        return replace(given, note=_ON_HEADS) if between else replace(given, deferred=own)
    if outline.block_of(given.module) is None:
        return given
    if given.style == "rowwise" and "bias" in own:
        return replace(given, deferred=("bias",))
    if (
        given.style == "heads"
        and dict(outline.modules[given.module].named_parameters()).get("out_proj.bias") is not None
    ):
        return replace(given, deferred=("out_proj.bias",))
    return given


def _visited(outline: Outline, found: dict[str, Assignment], name: str) -> Iterator[str]:
    """A module and those in it, without what is in replicated ones and in an `nn.MultiheadAttention`."""
    yield name
    if name in found and found[name].style in {"replicated", "heads"}:
        return
    for child in outline.children(name):
        yield from _visited(outline, found, child)


def _added(
    outline: Outline, found: dict[str, Assignment], split: set[str], name: str, *, is_attention: bool
) -> Assignment | None:
    """What becomes of a module in a block that has no style yet, if anything."""
    module, own = outline.modules[name], own_parameters(outline.modules[name])
    if is_attention and name not in outline.blocks and not any(within(each, name) for each in split):
        return Assignment(name, "replicated")
    if not own or next(module.children(), None) is not None or isinstance(module, nn.Embedding) or outline.matrix(name):
        return None
    if _is_between(outline, found, name) or (is_norm(module) and _is_routed(outline, name)):
        return None
    if is_norm(module):
        return Assignment(name, "sequence", deferred=own)
    return Assignment(outline.unit(name, split), "replicated")


def _is_routed(outline: Outline, name: str) -> bool:
    """Whether a module is part of an expert: the tokens that it gets are chosen from the whole sequence."""
    block = outline.block_of(name)
    return block is not None and "expert" in name.removeprefix(block).lower()


def _is_between(outline: Outline, assignments: dict[str, Assignment], name: str) -> bool:
    """Whether a module stands between column- and row-wise layers, where features are split and positions are not.

    So does what is named after queries, keys or values, what has another width than goes into the column-wise layers,
    what is registered between the two, and in an attention anything that is no norm.
    """
    if role(_bare(name)) in {"query", "key", "value"}:
        return True
    holder = parent(name)
    siblings = outline.children(holder)
    styles = [assignments[each].style if each in assignments else "" for each in siblings]
    columns = [each for each, style in zip(siblings, styles, strict=True) if style in _COLUMNS]
    if not columns:
        return False
    module = outline.modules[name]
    if not is_norm(module):
        return holder not in outline.blocks
    width = next(module.parameters()).shape[-1]
    if width != outline.known_matrix(columns[0]).inputs:
        return True
    here = siblings.index(name)
    before = [style for style in styles[:here] if style in _COLUMNS or style == "rowwise"]
    return bool(before) and before[-1] in _COLUMNS and "rowwise" in styles[here:]


def _bare(name: str) -> str:
    """A norm's name without what says that it is one: q_norm, norm_q, q_layernorm, ln_q."""
    words = last(name).lower().replace("layernorm", "norm").split("_")
    return "_".join(word for word in words if word not in {"norm", "ln", "layer", "rms"})
