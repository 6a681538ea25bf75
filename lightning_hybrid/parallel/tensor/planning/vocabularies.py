"""Finds token embeddings and the heads that score each token."""

from __future__ import annotations

import re

from torch import nn

from lightning_hybrid.parallel.tensor.planning.outline import Outline, last, odd_lookup

_NO_TOKENS = re.compile(r"pos|wpe|type|segment|time", re.IGNORECASE)


def find_vocabularies(outline: Outline) -> list[str]:
    """Embeddings and heads outside the blocks that belong together: tied, or of one vocabulary and width."""
    outside = [name for name in outline.modules if outline.block_of(name) is None]
    embeddings = {name: embedding for name in outside if (embedding := _tokens(outline, name)) is not None}
    heads = [name for name in outside if isinstance(outline.modules[name], nn.Linear) and outline.matrix(name)]
    found = set[str]()
    for head in heads:
        layer = outline.known_matrix(head)
        weight = outline.modules[head].get_parameter("weight")
        matching = {
            name
            for name, embedding in embeddings.items()
            if embedding.weight is weight
            or (embedding.weight.shape == (layer.outputs, layer.inputs) and not _NO_TOKENS.search(last(name)))
        }
        found |= matching | ({head} if matching else set())
    return [name for name in outside if name in found]


def _tokens(outline: Outline, name: str) -> nn.Embedding | None:
    """The embedding that a module is, if its rows can be dealt out."""
    module = outline.modules[name]
    return module if isinstance(module, nn.Embedding) and not odd_lookup(module) else None
