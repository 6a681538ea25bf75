"""Tables that cover every pair of values: a small part of the full product that finds what two settings do together."""

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from typing import Any

Pair = tuple[tuple[int, Any], tuple[int, Any]]
"""Two columns and their values."""


def pairs_of(row: tuple[Any, ...]) -> set[Pair]:
    return set(combinations(enumerate(row), 2))


def all_rows(columns: Iterable[Sequence[Any]], valid: Callable[..., bool]) -> list[tuple[Any, ...]]:
    return [row for row in product(*columns) if valid(*row)]


def all_pairs(columns: Iterable[Sequence[Any]], valid: Callable[..., bool]) -> list[tuple[Any, ...]]:
    """Choose valid rows, each time one with most pairs that none before it has, until every pair of a valid row is in.

    Args:
        columns: For each column, its values, hashable; among equally good rows one with earlier values comes first.
        valid: Whether a row, given as positional arguments, can be run.
    """
    candidates = [(row, pairs_of(row)) for row in all_rows(columns, valid)]
    missing = set().union(*(pairs for _, pairs in candidates))
    chosen = []
    while missing:
        row, pairs = max(candidates, key=lambda candidate: len(candidate[1] & missing))
        chosen.append(row)
        missing -= pairs
    return chosen
