"""How many heads an attention has: a shard must hold whole ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Any

from torch import nn

from lightning_hybrid.parallel.tensor.planning.outline import Outline, parent

QUERY_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "nheads")
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "d_head", "dim_head", "d_kv")


@dataclass(frozen=True)
class Heads:
    """Numbers of heads of one attention; the second is smaller in a grouped-query one (arXiv:2305.13245)."""

    query: int
    key_value: int


def find_heads(outline: Outline, name: str, *, query: int, key: int | None) -> Heads | None:
    """Heads of the attention whose projections a module holds, or None if nothing tells.

    The module's own attributes are asked, those of what holds it up to the block, and then a `config` of these or
    further out. Without a number of key-value heads the sizes tell.

    Args:
        outline: The model.
        name: Of the module that holds the projections.
        query: Features of all queries, or of a fused projection if `key` is None.
        key: Features of all keys.
    """
    module = outline.modules[name]
    if isinstance(module, nn.MultiheadAttention):
        return Heads(module.num_heads, module.num_heads)
    holders = list(_holders(outline, name))
    heads = _first_number(holders, QUERY_HEADS)
    if heads is None and key is not None:
        head_size = _first_number(holders, HEAD_SIZES)
        heads = query // head_size if head_size and query % head_size == 0 else None
    if heads is None:
        return None
    key_value = _first_number(holders, KEY_VALUE_HEADS)
    if key_value is None:
        key_value = heads * key // query if key is not None and heads * key % query == 0 else heads
    return Heads(heads, key_value) if key_value else None


def check_heads(heads: Heads, name: str, size: int) -> None:
    """Refuse a size that would cut through heads.

    Raises:
        ValueError: If one of the numbers is not a multiple of the size.
    """
    if heads.query % size == 0 and heads.key_value % size == 0:
        return
    common = gcd(heads.query, heads.key_value)
    fitting = [n for n in range(2, common + 1) if common % n == 0]
    sizes = f"Sizes that divide both: {fitting}" if fitting else "No size above 1 divides both"
    raise ValueError(
        f"{name} has {heads.query} query heads and {heads.key_value} key-value heads, which "
        f"tensor_parallel_size={size} does not divide. {sizes}; a tensor_parallel_plan without "
        "this attention leaves it whole."
    )


def _holders(outline: Outline, name: str) -> Iterator[Any]:
    """Objects whose attributes may be the numbers, the nearest first."""
    scope = outline.block_of(name)
    around = [name]
    while around[-1]:
        around.append(parent(around[-1]))
    near = around[: around.index(scope) + 1] if scope in around else around[:1]
    yield from (outline.modules[each] for each in near)
    for each in around:
        config = getattr(outline.modules.get(each), "config", None)
        if config is not None:
            yield config


def _first_number(holders: list[Any], names: tuple[str, ...]) -> int | None:
    for holder in holders:
        for name in names:
            value = holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)
            if type(value) is int and value > 0:
                return value
    return None
