from hypothesis import given
from hypothesis import strategies as st

from tests.pairs import all_pairs, all_rows, pairs_of

COLUMNS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True), min_size=2, max_size=4)


@given(COLUMNS, st.integers(2, 7))
def test_every_pair_of_a_valid_row_is_covered_by_valid_rows(columns, divisor):
    def valid(*row):
        return sum(row) % divisor > 0

    rows = all_pairs(columns, valid)
    assert all(valid(*row) for row in rows)
    assert set().union(*map(pairs_of, rows)) == set().union(*map(pairs_of, all_rows(columns, valid)))
    assert len(set(rows)) == len(rows)


def test_two_columns_need_their_product_and_a_third_costs_nothing():
    assert all_pairs(["abc", "xy"], lambda *row: True) == all_rows(["abc", "xy"], lambda *row: True)
    assert len(all_pairs(["abc", "xyz", (0, 1)], lambda *row: True)) == 9


def test_excluded_pairs_are_in_no_row():
    rows = all_pairs(["ab", "xy", (0, 1)], lambda first, second, _: (first, second) != ("a", "x"))
    assert all(row[:2] != ("a", "x") for row in rows)


def test_no_valid_row_makes_an_empty_table():
    assert all_pairs(["ab", "xy"], lambda *row: False) == []
