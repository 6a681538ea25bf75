"""What compression makes of the bytes that layers save for backward: sums, ratios, and rows of a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lightning_hybrid.functional.memory import sum_by_module
from lightning_hybrid.functional.timeline import OUTSIDE, group_modules

COMPRESSION_COLUMNS = ("layer", "bytes before", "bytes after", "ratio", "how")
RAW = "raw"
CODES = (RAW, "bits", "argmax", "sparse", "fp16", "fp10", "fp8", "shape")
"""How a storage may lie, in the order of tables and pictures; also several words, such as "sparse fp8"."""


@dataclass(frozen=True)
class LayerBytes:
    """Bytes that a layer saves for backward.

    Attributes:
        before: Of its storages as autograd saves them.
        after: Of what is held instead, by how it lies: words of `CODES`. "raw" is what is not compressed.
    """

    before: int
    after: Mapping[str, int]

    @property
    def total_after(self) -> int:
        """Bytes that are held."""
        return sum(self.after.values())

    @property
    def ratio(self) -> str:
        """How many times smaller it has become, such as "3.1x"."""
        if not self.total_after:
            return "nothing left"
        ratio = self.before / self.total_after
        return f"{ratio:.1f}x" if ratio < 100 else f"{ratio:.0f}x"


def order_of_code(code: str) -> tuple[int, int, str]:
    """Sorts codes: by their last word as in `CODES`, those of one word first; unknown ones last."""
    words = code.split()
    return CODES.index(words[-1]) if words and words[-1] in CODES else len(CODES), len(words), code


def sum_layers(layers: Iterable[LayerBytes]) -> LayerBytes:
    """All together."""
    before, after = 0, dict[str, int]()
    for layer in layers:
        before += layer.before
        for code, num_bytes in layer.after.items():
            after[code] = after.get(code, 0) + num_bytes
    return LayerBytes(before, after)


def group_layers(layers: Mapping[str, LayerBytes], most: int = 40) -> dict[str, LayerBytes]:
    """Layers that save anything, or where there are many, sums over modules whose names begin alike.

    Args:
        layers: By name, in the order in which they save; "" is what is outside of modules.
        most: Modules that are kept apart at most. Of more, names are cut to the fewest parts that leave half as many
            groups, and neighbours are put together as in `timeline.group_modules`.
    """
    before = {name: layer.before for name, layer in layers.items() if layer.before}
    groups = {name: name or OUTSIDE for name in before}
    if len(before) > most:
        depths = range(1, 1 + max(name.count(".") + 1 for name in before))
        depth = next((d for d in depths if 2 * len(sum_by_module(before, d)) >= most), depths[-1])
        groups = group_modules(before, depth, most)
    members: dict[str, list[LayerBytes]] = {}
    for name, group in groups.items():
        members.setdefault(group, []).append(layers[name])
    return {group: sum_layers(of_group) for group, of_group in members.items()}


def compression_rows(layers: Mapping[str, LayerBytes]) -> list[tuple[str, ...]]:
    """What a table shows, in `COMPRESSION_COLUMNS`: a row for each layer, and totals.

    Args:
        layers: By name, in the order of the rows, such as those of `group_layers`.
    """
    rows = [*((name or OUTSIDE, layer) for name, layer in layers.items()), ("all", sum_layers(layers.values()))]
    return [(name, f"{row.before:,}", f"{row.total_after:,}", row.ratio, _how(row)) for name, row in rows]


def _how(layer: LayerBytes) -> str:
    codes = sorted(layer.after, key=order_of_code)
    return ", ".join(code if len(codes) == 1 else f"{code} {layer.after[code]:,}" for code in codes)
