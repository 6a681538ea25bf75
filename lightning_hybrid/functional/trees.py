"""Nested containers as a list of leaves and a picklable description of what held them.

`torch.utils._pytree` was considered: it is private, and it descends into registered objects such as key-value caches,
whose tensors must stay where they are. Here only tuples, lists, mappings and named tuples are containers; anything else
is a leaf.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import lru_cache
from typing import Any


@dataclass(frozen=True)
class Node:
    """A container: its type, the keys of a mapping (else None) and its children, each a `Node` or None for a leaf."""

    kind: type
    keys: tuple[Any, ...] | None
    children: tuple[Node | None, ...]


def flatten(tree: object) -> tuple[list[Any], Node | None]:
    """Leaves of `tree` in order, and its description; `unflatten` is the inverse."""
    leaves: list[Any] = []
    return leaves, _describe(tree, leaves)


def leaves_of(tree: object) -> list[Any]:
    """Only the leaves."""
    return flatten(tree)[0]


def unflatten(leaves: list[Any], node: Node | None) -> Any:
    """The tree whose leaves are `leaves`, in order."""
    return _build(iter(leaves).__next__, node)


def map_leaves(function: Callable[[Any], Any], tree: object) -> Any:
    """The same tree with `function` applied to each leaf."""
    leaves, node = flatten(tree)
    return unflatten([function(leaf) for leaf in leaves], node)


def children_of(tree: Any) -> tuple[list[Any], Node | None]:
    """The direct children of a container and its description, for which they are leaves; ([], None) for a leaf."""
    if not is_container(tree):
        return [], None
    if isinstance(tree, Mapping):
        return [tree[key] for key in tree], Node(type(tree), tuple(tree.keys()), (None,) * len(tree))
    return list(tree), Node(type(tree), None, (None,) * len(tree))


def is_container(tree: object) -> bool:
    """Whether `flatten` descends into it."""
    kind: Any = type(tree)
    return _is_container_type(kind)


@lru_cache(maxsize=512)  # a state of random numbers has hundreds of leaves; classes may come and go
def _is_container_type(kind: type) -> bool:
    return issubclass(kind, Mapping) or kind in (tuple, list) or _is_named_tuple(kind) or _is_struct_sequence(kind)


def _describe(tree: Any, leaves: list[Any]) -> Node | None:
    if not is_container(tree):
        leaves.append(tree)
        return None
    children, node = children_of(tree)
    assert node is not None, "a container"
    return Node(node.kind, node.keys, tuple(_describe(child, leaves) for child in children))


def _build(take: Callable[[], Any], node: Node | None) -> Any:
    if node is None:
        return take()
    children = [_build(take, child) for child in node.children]
    if node.keys is None:
        return node.kind(*children) if _is_named_tuple(node.kind) else node.kind(children)
    items = dict(zip(node.keys, children, strict=True))
    if node.kind is dict or issubclass(node.kind, defaultdict):
        return items
    if is_dataclass(node.kind):  # transformers' ModelOutput is a mapping and a dataclass
        return node.kind(**{str(key): value for key, value in items.items()})
    kind: Any = node.kind
    return kind(items)


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _is_struct_sequence(kind: type) -> bool:
    """Such as torch.return_types.topk."""
    return issubclass(kind, tuple) and hasattr(kind, "n_sequence_fields")
