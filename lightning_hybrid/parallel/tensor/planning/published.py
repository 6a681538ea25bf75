"""The tensor plan that a model brings along: transformers' `tp_plan`, or `base_model_tp_plan` of its configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

from lightning_hybrid.parallel.tensor.planning.attentions import INTERLEAVED, role
from lightning_hybrid.parallel.tensor.planning.outline import Outline, join, last, odd_lookup

_STYLES = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "packed_rowwise": "rowwise",
    "embedding_rowwise": "vocab",
}
OURS = {"colwise_gather_output", "rowwise_split_input"}  # theirs gather; our rules may do better
SILENT = {"replicated_with_grad_allreduce", "all_reduce", "local_params", "gather"}  # of layouts that we do not have


def published_plan(outline: Outline) -> tuple[dict[str, str], dict[str, str]]:
    """Styles by module, and the model's own words for modules that our styles do not cover."""
    styles: dict[str, str] = {}
    foreign: dict[str, str] = {}
    plan = _plan(outline)
    for pattern, theirs in plan.items():
        shape = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        for name in outline.modules:
            if not shape.fullmatch(name) or theirs in SILENT:
                continue
            style = _translate(outline, name, theirs)
            if style:
                styles[name] = style
            elif theirs not in OURS:
                foreign[name] = theirs
    return styles, foreign


def _plan(outline: Outline) -> dict[str, str]:
    """Plans of all modules that have one, with their names in front; an outer module's word counts."""
    found: dict[str, str] = {}
    for name, module in reversed(outline.modules.items()):
        for prefix, plan in _plans_of(module):
            found |= {join(join(name, prefix), pattern): style for pattern, style in plan.items()}
    return found


def _plans_of(module: nn.Module) -> list[tuple[str, Mapping[str, str]]]:
    plans: list[tuple[str, Mapping[str, str]]] = []
    base = getattr(module, "base_model_prefix", None)  # transformers' models have it, their layers have not
    if isinstance(base, str):
        of_base = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
        plans.append((base if base and hasattr(module, base) else "", of_base or {}))
    whole = getattr(module, "tp_plan", None)
    plans.append(("", whole if isinstance(whole, Mapping) else {}))
    return plans


def _translate(outline: Outline, name: str, theirs: str) -> str:
    """Our style for theirs, or nothing."""
    module, found = outline.modules[name], outline.matrix(name)
    if theirs == "embedding_rowwise":
        return "vocab" if isinstance(module, nn.Embedding) and not odd_lookup(module) else ""
    if theirs == "colwise_gather_output" and outline.block_of(name) is None and found and _is_head(outline, name):
        return "vocab"
    if found is None:
        return ""
    if theirs == "packed_colwise":
        fused = role(name) == "fused"
        return ("colwise" if last(name) == INTERLEAVED else "fused_qkv") if fused else "fused_gate_up"
    return _STYLES.get(theirs, "")


def _is_head(outline: Outline, name: str) -> bool:
    """Whether a linear layer has an output for each token of an embedding."""
    outputs = outline.known_matrix(name).outputs
    embeddings = [module for module in outline.modules.values() if isinstance(module, nn.Embedding)]
    return any(embedding.num_embeddings == outputs for embedding in embeddings)
