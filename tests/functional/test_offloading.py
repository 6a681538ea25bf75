from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.functional.offloading import cheapest_offload, offloaded_peak_bytes, smallest_offload_budget

SIZES = st.lists(st.integers(0, 9), max_size=7)


def moved(sizes, offloaded):
    return sum(size for size, is_offloaded in zip(sizes, offloaded, strict=True) if is_offloaded)


def on_the_device(sizes, offloaded, in_flight):
    """Bytes while each group runs, written down as they are defined."""
    kept = [0 if gone else size for size, gone in zip(sizes, offloaded, strict=True)]
    copied = [size if gone else 0 for size, gone in zip(sizes, offloaded, strict=True)]
    return [
        (in_flight - 1) * sum(kept) + sum(kept[:i]) + sizes[i] + (copied[i - 1] if i else 0) for i in range(len(sizes))
    ]


@given(sizes=SIZES.filter(bool), bits=st.integers(0, 127), in_flight=st.integers(1, 3))
def test_the_peak_is_that_of_the_group_with_the_most_beside_it(sizes, bits, in_flight):
    offloaded = [bool(bits >> i & 1) for i in range(len(sizes))]
    assert offloaded_peak_bytes(sizes, offloaded, in_flight) == max(on_the_device(sizes, offloaded, in_flight))


@given(sizes=SIZES, room=st.integers(0, 40), in_flight=st.integers(1, 3))
def test_the_plan_moves_the_fewest_bytes_of_all_plans(sizes, room, in_flight):
    budget = smallest_offload_budget(sizes) + room

    def badness(offloaded):
        return moved(sizes, offloaded), offloaded_peak_bytes(sizes, offloaded, in_flight)

    every = list(product([False, True], repeat=len(sizes)))
    best = min(badness(plan) for plan in every if offloaded_peak_bytes(sizes, plan, in_flight) <= budget)
    assert badness(cheapest_offload(sizes, budget, in_flight)) == best


@given(sizes=SIZES, in_flight=st.integers(1, 3))
def test_the_smallest_budget_is_that_of_the_best_of_all_plans(sizes, in_flight):
    every = product([False, True], repeat=len(sizes))
    assert smallest_offload_budget(sizes) == min(offloaded_peak_bytes(sizes, plan, in_flight) for plan in every)


@given(sizes=SIZES.filter(any), in_flight=st.integers(1, 3))
def test_a_budget_below_the_smallest_is_refused_by_its_name(sizes, in_flight):
    smallest = smallest_offload_budget(sizes)
    with pytest.raises(ValueError, match=f"budget_bytes={smallest - 1}: .* Allow {smallest} or more"):
        cheapest_offload(sizes, smallest - 1, in_flight)
    assert offloaded_peak_bytes(sizes, cheapest_offload(sizes, smallest, in_flight), in_flight) == smallest


def test_equal_blocks_are_offloaded_from_the_first_on():
    sizes = [3, *[10] * 12, 4]
    assert cheapest_offload(sizes, 50) == [False, *[True] * 8, *[False] * 5]


def test_more_sums_than_can_be_looked_at_still_fill_the_budget():
    sizes = [10**9 + 7**i % 10**8 for i in range(40)]
    budget = 20 * (10**9 + 10**8 // 2)  # half of them, about
    offloaded = cheapest_offload(sizes, budget)
    assert offloaded_peak_bytes(sizes, offloaded) <= budget
    assert moved(sizes, offloaded) <= (sum(sizes) - budget) * 1.005  # what does not fit is moved


@pytest.mark.parametrize(("sizes", "in_flight"), [([1, -1], 1), ([1], 0)])
def test_what_makes_no_sense_is_refused(sizes, in_flight):
    with pytest.raises(ValueError, match=r"in_flight=\d must be at least 1, and sizes not negative"):
        cheapest_offload(sizes, 9, in_flight)
