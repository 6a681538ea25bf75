"""Finds MLPs by the shapes of their linear layers: into a wider space and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lightning_hybrid.parallel.tensor.planning.outline import Outline, is_norm, own_parameters


@dataclass(frozen=True)
class MLP:
    """One MLP.

    Attributes:
        holder: Dotted name of what holds its layers.
        styles: Style of each of its layers, by dotted name.
        width: Features between them.
        reason: Why they are no pair, or nothing.
    """

    holder: str
    styles: dict[str, str]
    width: int
    reason: str = ""


def find_mlps(outline: Outline, scope: str, taken: set[str]) -> list[MLP]:
    """Those in a block; `taken` are linear layers that are something else."""
    found: list[MLP] = []
    for name in outline.inside(scope):
        if isinstance(outline.modules[name], nn.MultiheadAttention):
            continue
        free = [child for child in outline.matrices(name) if child not in taken]
        wrapped = [each for child in outline.children(name) for each in _sole(outline, child) if each not in taken]
        apart = _pairs(outline, name, wrapped) if wrapped != free else []
        if apart and not any(mlp.reason for mlp in apart):
            found += apart
            continue
        if len(free) < 2:
            continue
        if name != scope and _has_more(outline, name):
            found.append(MLP(name, dict.fromkeys(free, ""), 0, "it holds more than linear layers: no rule covers it"))
        else:
            found += _pairs(outline, name, free)
    return found


def _sole(outline: Outline, name: str) -> list[str]:
    """The module if it is a linear layer, or the only one in it beside norms (BERT's `intermediate`)."""
    holding = [each for each in outline.inside(name) if own_parameters(outline.modules[each])]
    layers = [each for each in holding if outline.matrix(each)]
    norms = [each for each in holding if is_norm(outline.modules[each])]
    return layers if len(layers) == 1 and len(holding) == 1 + len(norms) else []


def _has_more(outline: Outline, name: str) -> bool:
    """Whether a module has parameters of its own, or layers that are neither linear nor norms."""
    children = [outline.modules[child] for child in outline.children(name) if not outline.matrix(child)]
    strange = [child for child in children if own_parameters(child) and not is_norm(child)]
    return bool(strange or own_parameters(outline.modules[name]))


def _pairs(outline: Outline, name: str, free: Sequence[str]) -> list[MLP]:
    """MLPs among linear layers in registration order: up, down; up, up, down; up, down, up (Meta's w1, w2, w3)."""
    rest, found = list(free), []
    in_order = isinstance(outline.modules[name], nn.Sequential)
    while rest:
        taken = next((n for n in (3, 2) if _styles(outline, rest[:n], n, square=in_order)), None)
        if taken is None:
            return [MLP(name, dict.fromkeys(free, ""), 0, "its linear layers are no pairs of widening and narrowing")]
        styles = _styles(outline, rest[:taken], taken, square=in_order)
        width = next(outline.known_matrix(each).inputs for each, style in styles.items() if style == "rowwise")
        found.append(MLP(name, styles, width))
        rest = rest[taken:]
    return found


def _styles(outline: Outline, names: Sequence[str], count: int, *, square: bool) -> dict[str, str]:
    """Styles of linear layers that are one MLP, or nothing."""
    if len(names) < count:
        return {}
    shapes = [(found.inputs, found.outputs) for found in map(outline.known_matrix, names)]
    hidden, wide = shapes[0]
    down = (wide, hidden)
    if wide > hidden or (square and wide == hidden and count == 2):
        if shapes == [(hidden, wide), down]:
            return dict(zip(names, ("colwise", "rowwise"), strict=True))
        if shapes == [(hidden, wide), (hidden, wide), down]:
            return dict(zip(names, ("colwise", "colwise", "rowwise"), strict=True))
        if shapes == [(hidden, wide), down, (hidden, wide)]:
            return dict(zip(names, ("colwise", "rowwise", "colwise"), strict=True))
    if wide % 2 == 0 and wide // 2 != hidden and shapes == [(hidden, wide), (wide // 2, hidden)]:
        return dict(zip(names, ("fused_gate_up", "rowwise"), strict=True))
    return {}
