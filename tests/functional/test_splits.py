"""Where slices lie: cut and joined again, and after any view that has a split."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from lightning_hybrid.functional import splits
from lightning_hybrid.functional.splits import Split, share

SIZES = [1, 2, 3, 4]


def numbered(shape):
    return torch.arange(math.prod(shape)).view(shape)


@st.composite
def split_shapes(draw):
    """A whole shape and a split of one of its dimensions, with equal or unequal sections."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    dim = draw(st.integers(0, len(shape) - 1))
    count = draw(st.integers(1, 3))
    same = draw(st.integers(1, 8))
    sections = (same,) * count if draw(st.booleans()) else tuple(draw(st.integers(1, 8)) for _ in range(count))
    shape[dim] = sum(sections)
    return tuple(shape), Split(dim, sections)


@pytest.mark.parametrize("size", SIZES)
def test_shares_are_as_equal_as_can_be_and_add_up(size):
    for length in range(20):
        shares = [share(length, size, rank) for rank in range(size)]
        assert sum(shares) == length
        assert max(shares) - min(shares) <= 1
        assert shares == sorted(shares, reverse=True)


@given(split_shapes(), st.sampled_from(SIZES))
def test_parts_join_to_the_whole(case, size):
    shape, split = case
    whole = numbered(shape)
    parts = [split.take(whole, size, rank) for rank in range(size)]
    assert torch.equal(split.join(parts), whole)
    for rank, part in enumerate(parts):
        assert tuple(part.shape) == split.local_shape(shape, size, rank)
        assert split.whole_shape(part.shape) == shape
        index = torch.cat([torch.arange(a, b) for a, b in splits.bounds(split, size, rank)])
        assert torch.equal(whole.index_select(split.dim, index), part)


def test_each_rank_holds_whole_heads_of_a_fused_projection():
    split = Split(0, (4, 4, 4))  # two heads of two in each of query, key and value
    rows = numbered((12,))
    assert split.take(rows, 2, 0).tolist() == [0, 1, 4, 5, 8, 9]
    assert split.take(rows, 2, 1).tolist() == [2, 3, 6, 7, 10, 11]


@settings(max_examples=300)
@given(st.data(), split_shapes(), st.sampled_from(SIZES))
def test_a_view_of_a_part_is_the_part_of_the_view(data, case, size):
    shape, split = case
    whole = numbered(shape)
    first = data.draw(st.sampled_from([d for d in range(1, whole.numel() + 1) if whole.numel() % d == 0]))
    rest = whole.numel() // first
    second = data.draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0]))
    new = data.draw(st.permutations([first, second, rest // second]))
    found = splits.view(split, shape, new, size)
    if found is None:
        return
    for rank in range(size):
        expected = found.take(whole.reshape(new), size, rank)
        assert_close(split.take(whole, size, rank).reshape(found.local_shape(new, size, rank)), expected)


@pytest.mark.parametrize(
    ("split", "shape", "new", "expected"),
    [
        (Split(2, (24,)), (2, 5, 24), (2, 5, 4, 6), Split(2, (4,))),  # features to heads
        (Split(2, (4,)), (2, 5, 4, 6), (2, 5, 24), Split(2, (24,))),  # and back
        (Split(2, (8, 8, 8)), (2, 5, 24), (2, 5, 3, 4, 2), Split(3, (4,))),  # query, key and value in a dimension
        (Split(2, (24,)), (2, 5, 24), (2, 5, 4, 3, 2), Split(2, (4,))),  # heads first
        (Split(1, (6,)), (3, 6, 4), (18, 4), Split(0, (6, 6, 6))),  # positions of all samples
        (Split(0, (6, 6, 6)), (18, 4), (3, 6, 4), Split(1, (6,))),
        (Split(1, (4,)), (2, 4, 5, 6), (8, 5, 6), Split(0, (4, 4))),  # samples and heads
        (Split(2, (24,)), (2, 5, 24), (2, 5, 3, 8), None),  # three heads on two ranks
        (Split(1, (6,)), (2, 6, 4), (2, 24), Split(1, (24,))),
        (Split(1, (4, 2)), (2, 6, 4), (2, 24), None),  # unequal sections
    ],
)
def test_views_of_attention(split, shape, new, expected):
    assert splits.view(split, shape, new, 2) == expected


def test_cuts_go_between_sections():
    split = Split(1, (8, 4, 4))
    assert splits.pieces(split, [8, 4, 4]) == [Split(1, (8,)), Split(1, (4,)), Split(1, (4,))]
    assert splits.pieces(split, [12, 4]) == [Split(1, (8, 4)), Split(1, (4,))]
    assert splits.pieces(split, [4, 12]) is None
    assert splits.pieces(split, [8, 4]) is None


def test_a_shape_with_one_unknown():
    assert splits.resolve((2, -1, 3), 24) == (2, 4, 3)
    assert splits.resolve((2, 12), 24) == (2, 12)
