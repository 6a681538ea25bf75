"""The tensor plan: which module of a model is split in which way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from torch import nn

from lightning_hybrid.parallel.tensor.assignment import Assignment
from lightning_hybrid.parallel.tensor.planning.attentions import Attention, find_attentions
from lightning_hybrid.parallel.tensor.planning.heads import Heads, check_heads, find_heads
from lightning_hybrid.parallel.tensor.planning.outline import Outline, parent
from lightning_hybrid.parallel.tensor.planning.patterns import AUTO, match
from lightning_hybrid.parallel.tensor.planning.recognise import Recogniser
from lightning_hybrid.parallel.tensor.planning.sequences import with_sequence
from lightning_hybrid.parallel.tensor.planning.shared import follow
from lightning_hybrid.parallel.tensor.planning.styles import assign
from lightning_hybrid.parallel.tensor.planning.table import plan_table

__all__ = ["make_plan", "plan_table"]


def make_plan(
    root: nn.Module,
    blocks: Sequence[str],
    size: int,
    plan: Mapping[str, str] | Literal["auto"],
    *,
    sequence_parallel: bool,
) -> list[Assignment]:
    """Decide how each module is split; a plan is a matter of speed and memory, never of results.

    Args:
        root: The whole model, on any device, meta too.
        blocks: Dotted names of its repeated blocks, which the automatic rules look into.
        size: Ranks on the tensor axis.
        plan: Style by pattern (see `patterns.match`), or "auto": the plan that transformers' models bring along, and
            else rules for attentions, MLPs, token embeddings and heads.
        sequence_parallel: Between the split layers of a block each rank works on its shard of the sequence.

    Returns:
        Modules with a style in registration order; the others stay whole.

    Raises:
        ValueError: If a pattern or style does not exist, a module cannot take its style, or sizes do not divide.
    """
    outline = Outline(root, blocks, size)
    if sequence_parallel and not blocks:
        raise ValueError(
            "sequence_parallel=True splits the sequence between the model's repeated blocks, and it has none. Put its "
            "layers in an nn.ModuleList or nn.Sequential, name that as pipeline_layers, or set sequence_parallel=False."
        )
    attentions = find_attentions(outline)
    if isinstance(plan, Mapping):
        styles, notes = _given(outline, plan, attentions, sequence_parallel=sequence_parallel)
    elif plan == "auto":
        styles, notes = Recogniser(outline, attentions).run()
    else:
        raise ValueError(f"tensor_parallel_plan={plan!r} is neither 'auto' nor a dictionary of patterns and styles.")
    heads = _heads(outline, styles, attentions)
    found = {name: assign(outline, name, style, heads.get(name)) for name, style in styles.items()}
    found |= {name: Assignment(name, "replicated", note=note) for name, note in notes.items()}
    found |= {name: replace(found[name], note=note) for name, note in _doubts(styles, attentions).items()}
    found = follow(outline, found)
    if sequence_parallel:
        found = with_sequence(outline, found, attentions)
    return [found[name] for name in outline.modules if name in found]


def _given(
    outline: Outline, plan: Mapping[str, str], attentions: Sequence[Attention], *, sequence_parallel: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """Styles of the user's plan, and notes of the automatic one where that leaves something to it."""
    styles, notes = match(outline, plan), dict[str, str]()
    left = {name for name, style in styles.items() if style == AUTO}
    if left:
        automatic, why = Recogniser(outline, attentions).run()
        found = {name: automatic[name] for name in left if name in automatic}
        styles = {name: found.get(name, style) for name, style in styles.items() if name not in left or name in found}
        notes = {name: note for name, note in why.items() if name in left}
    for pattern, style in plan.items():
        if style == "sequence" and not sequence_parallel:
            raise ValueError(
                f"tensor_parallel_plan gives {pattern!r} the style 'sequence', which needs sequence_parallel=True. Set "
                "it, or leave the pattern out."
            )
    return styles, notes


def _doubts(styles: Mapping[str, str], attentions: Sequence[Attention]) -> dict[str, str]:
    """Notes on given styles that work and yet gather in each step what another style would not."""
    fused = [name for attention in attentions for name, style in attention.styles.items() if style == "fused_qkv"]
    note = "queries, keys and values in one, of which 'fused_qkv' would give each rank whole heads"
    return {name: note for name in fused if styles.get(name) in {"colwise", "fused_gate_up"}}


def _heads(outline: Outline, styles: Mapping[str, str], attentions: Sequence[Attention]) -> dict[str, Heads]:
    """Heads of each projection that is split, all of which divide."""
    found: dict[str, Heads] = {}
    for attention in attentions:
        split = [n for n in attention.inputs if styles.get(n) in {"colwise", "fused_qkv", "heads"}]
        if split and attention.heads is not None:
            check_heads(attention.heads, attention.holder, outline.size)
            found |= dict.fromkeys(split, attention.heads)
    for name, style in styles.items():
        layer = outline.matrix(name)
        if style != "fused_qkv" or name in found or layer is None:
            continue
        heads = find_heads(outline, parent(name), query=layer.outputs, key=None)
        if heads is not None:
            check_heads(heads, parent(name), outline.size)
            found[name] = heads
    return found
