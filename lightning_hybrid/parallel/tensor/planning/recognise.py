"""The automatic plan: the model's own where it brings one, and our rules for what that leaves."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hybrid.parallel.tensor.planning.attentions import Attention
from lightning_hybrid.parallel.tensor.planning.heads import check_heads
from lightning_hybrid.parallel.tensor.planning.mlps import MLP, find_mlps
from lightning_hybrid.parallel.tensor.planning.outline import Outline, parent, within
from lightning_hybrid.parallel.tensor.planning.published import published_plan
from lightning_hybrid.parallel.tensor.planning.vocabularies import find_vocabularies


class Recogniser:
    """One automatic plan in the making.

    Args:
        outline: The model.
        attentions: Its attention layers.

    Attributes:
        styles: Style of each module that is split.
        notes: Why modules that could have been are left whole.
    """

    def __init__(self, outline: Outline, attentions: Sequence[Attention]) -> None:
        self.outline, self.attentions = outline, attentions
        self.styles: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        self._left: list[tuple[str, list[str], str]] = []  # holder, its layers, reason

    def run(self) -> tuple[dict[str, str], dict[str, str]]:
        """Styles and notes.

        Raises:
            ValueError: If an attention's heads do not divide.
        """
        foreign = self._take_published()
        if self.outline.blocks:
            self._take_vocabularies(foreign)
        for attention in self.attentions:
            if self._is_free(list(attention.styles), foreign):
                self._take_attention(attention)
        taken = {name for attention in self.attentions for name in attention.styles} | set(self.styles)
        for scope in self.outline.scopes:
            for mlp in find_mlps(self.outline, scope, taken):
                if self._is_free(list(mlp.styles), foreign):
                    self._take_mlp(mlp)
        self._take_vocabularies(foreign)  # without blocks only what nothing else wants
        self._note(foreign)
        return self.styles, self.notes

    def _is_free(self, names: Sequence[str], foreign: dict[str, str]) -> bool:
        scope = not self.outline.blocks or self.outline.block_of(names[0]) is not None
        return scope and not any(n in self.styles or any(within(n, other) for other in foreign) for n in names)

    def _take_published(self) -> dict[str, str]:
        """The model's plan, without what does not divide; returns what it says in styles that are not ours."""
        styles, foreign = published_plan(self.outline)
        for attention in self.attentions:
            if attention.heads and any(name in styles for name in attention.inputs):
                check_heads(attention.heads, attention.holder, self.outline.size)
        holders = {parent(name) for name, style in styles.items() if not _divides(self.outline, name, style)}
        for holder in sorted(holders):
            names = [name for name in styles if parent(name) == holder and styles[name] != "vocab"]
            self._left.append((holder, names, f"its sizes are no multiples of {self.outline.size}"))
            styles = {name: style for name, style in styles.items() if name not in names}
            foreign |= dict.fromkeys(names, "")
        self.styles |= styles
        return foreign

    def _take_vocabularies(self, foreign: dict[str, str]) -> None:
        for name in find_vocabularies(self.outline):
            if name not in foreign and name not in self.styles and _divides(self.outline, name, "vocab"):
                self.styles[name] = "vocab"

    def _take_attention(self, attention: Attention) -> None:
        if attention.reason:
            self._left.append((attention.holder, list(attention.styles), attention.reason))
            return
        assert attention.heads is not None
        check_heads(attention.heads, attention.holder, self.outline.size)
        self.styles |= attention.styles

    def _take_mlp(self, mlp: MLP) -> None:
        reason = mlp.reason
        if not reason and mlp.width % self.outline.size:
            reason = f"its {mlp.width} features are no multiple of {self.outline.size}"
        if reason:
            self._left.append((mlp.holder, list(mlp.styles), reason))
        else:
            self.styles |= mlp.styles

    def _note(self, foreign: dict[str, str]) -> None:
        """Say what is left whole: a module as one if nothing in it is split."""
        for name, theirs in foreign.items():
            if theirs:
                self._left.append((name, [], f"the model's plan says {theirs}, which has no counterpart here"))
        for holder, names, reason in self._left:
            split = any(within(name, holder) for name in self.styles)
            as_one = not split and holder not in self.outline.scopes
            whole = [holder] if as_one else [name for name in names if name not in self.styles]
            self.notes |= dict.fromkeys(whole, reason)
        inner = [n for n in self.notes for other in self.notes if n != other and within(n, other)]
        self.notes = {name: note for name, note in self.notes.items() if name not in inner}


def _divides(outline: Outline, name: str, style: str) -> bool:
    """Whether a module's sizes suit the style."""
    if style == "vocab":
        return outline.modules[name].get_parameter("weight").shape[0] >= outline.size
    found = outline.known_matrix(name)
    length = found.inputs if style == "rowwise" else found.outputs
    return length % (2 * outline.size if style == "fused_gate_up" else outline.size) == 0
