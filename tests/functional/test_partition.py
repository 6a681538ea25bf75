import random
from fractions import Fraction
from functools import partial
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.functional.partition import balanced, check, layers_of_rank, runs, stage_layers, uniform


def every_partition(num_layers, num_stages):
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        yield [end - start for start, end in pairwise((0, *cuts, num_layers))]


def stage_costs(partition, costs, first_cost, last_cost):
    loaded = [*costs]
    loaded[0] += first_cost
    loaded[-1] += last_cost
    return [sum(loaded[end - size : end]) for size, end in zip(partition, accumulate(partition), strict=True)]


def test_sixteen_layers_on_four_ranks_with_two_chunks():
    partition = uniform(16, 8)
    assert [[layer + 1 for layer in layers_of_rank(partition, 4, rank)] for rank in range(4)] == [
        [1, 2, 9, 10],
        [3, 4, 11, 12],
        [5, 6, 13, 14],
        [7, 8, 15, 16],
    ]


def test_uniform_gives_the_rest_to_the_first_stages():
    assert uniform(10, 4) == [3, 3, 2, 2]


@given(num_layers=st.integers(1, 60), num_stages=st.integers(1, 60), cost=st.floats(0, 1e6))
def test_equal_layers_are_split_evenly_whatever_their_cost(num_layers, num_stages, cost):
    num_stages = min(num_layers, num_stages)
    assert balanced([cost] * num_layers, num_stages) == uniform(num_layers, num_stages)


@given(
    costs=st.lists(st.integers(0, 6), min_size=1, max_size=9),
    num_stages=st.integers(1, 9),
    first_cost=st.integers(0, 8),
    last_cost=st.integers(0, 8),
)
def test_balanced_is_the_best_of_all_partitions(costs, num_stages, first_cost, last_cost):
    num_stages = min(num_stages, len(costs))

    def badness(partition):
        stages = stage_costs(partition, costs, first_cost, last_cost)
        squares = sum(cost**2 for cost in stages), sum(size**2 for size in partition)
        return max(stages), *squares, [-size for size in partition]

    best = min(every_partition(len(costs), num_stages), key=badness)
    assert balanced(costs, num_stages, first_cost, last_cost) == best


@pytest.mark.parametrize("whole", [True, False], ids=["whole costs", "real costs"])
def test_balanced_within_a_memory_cap_is_the_best_of_all_partitions_that_fit(whole):
    draw = random.Random(whole)
    kept = 0
    for _ in range(2000):
        num_layers = draw.randint(1, 8)
        num_stages, cap = draw.randint(1, num_layers), draw.randint(0, 20)
        costs = [draw.randint(0, 6) if whole else draw.random() for _ in range(num_layers)]
        memory = [draw.randint(0, 6) for _ in range(num_layers)]
        every = list(every_partition(num_layers, num_stages))
        fitting = [partition for partition in every if max(stage_costs(partition, memory, 0, 0)) <= cap]
        if fitting:
            kept += 1
            best = min(fitting, key=partial(badness, [Fraction(cost) for cost in costs]))
            assert balanced(costs, num_stages, memory=memory, max_memory=cap) == best
        else:
            least = min(max(stage_costs(partition, memory, 0, 0)) for partition in every)
            with pytest.raises(ValueError, match=rf"max_stage_memory={cap}: .* Allow {least} or more"):
                balanced(costs, num_stages, memory=memory, max_memory=cap)
    assert 500 < kept < 1900


def badness(costs, partition):
    stages = stage_costs(partition, costs, 0, 0)
    squares = sum(cost**2 for cost in stages), sum(size**2 for size in partition)
    return max(stages), *squares, [-size for size in partition]


def test_a_memory_cap_counts_every_layer():
    with pytest.raises(ValueError, match="max_memory=5 needs the bytes of 3 layers, got 2"):
        balanced([1, 1, 1], 2, memory=[1, 1], max_memory=5)


def test_a_heavy_head_takes_layers_from_the_last_stage():
    assert balanced([1.0] * 12, 4, first_cost=0.5, last_cost=3.0) == [3, 4, 4, 1]


def test_rounding_of_costs_does_not_decide():
    assert balanced([0.1] * 3 + [0.7] + [0.1] * 3, 3) == [3, 1, 3]
    assert balanced([0.1, 0.2, 0.3, 0.3, 0.2, 0.1], 2) == [3, 3]


def test_stage_layers_follow_one_another():
    assert stage_layers([2, 3, 1]) == [range(0, 2), range(2, 5), range(5, 6)]


@pytest.mark.parametrize(
    ("lists", "partition", "expected"),
    [
        (["abcd"], [], ["abcd"]),
        (["abcd"], [1, 2, 1], ["a", "bc", "d"]),
        (["abc", "xyz"], [], ["abc", "xyz"]),
        (["abc", "xyz"], [2, 2, 2], ["ab", "c", "x", "yz"]),
        (["abc", "xyz"], [3, 3], ["abc", "xyz"]),
        ([], [], []),
    ],
)
def test_runs_end_where_a_list_or_a_stage_ends(lists, partition, expected):
    assert ["".join(run) for run in runs(lists, partition)] == expected


def test_a_partition_by_hand_that_fits_is_accepted():
    check([3, 5, 5, 3], num_layers=16, num_stages=4)


@pytest.mark.parametrize(
    ("partition", "said"),
    [([4, 4, 4], "3 stages with 12"), ([4, 4, 4, 5], "4 stages with 17"), ([8, 0, 4, 4], "4 stages with 16")],
)
def test_a_partition_by_hand_that_does_not_fit_is_refused_with_one_that_does(partition, said):
    with pytest.raises(ValueError, match=rf"{said} layers; needed are 4 stages .* 16 layers in all, such as \[4, 4"):
        check(partition, num_layers=16, num_stages=4)


@pytest.mark.parametrize(
    "split", [uniform, lambda layers, stages: balanced([1.0] * layers, stages), lambda *sizes: check([1, 1], *sizes)]
)
def test_more_stages_than_layers_is_refused_with_the_way_out(split):
    with pytest.raises(ValueError, match=r"2 layers cannot fill 3 stages.* at most 2, or a model with 3 layers"):
        split(2, 3)


@pytest.mark.parametrize("split", [uniform, lambda layers, stages: balanced([1.0] * layers, stages)])
def test_no_stage_is_refused(split):
    with pytest.raises(ValueError, match="num_stages=0"):
        split(2, 0)


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_costs_that_mean_nothing_are_refused(cost):
    with pytest.raises(ValueError, match=rf"costs must be finite and not negative, got \[{cost}\]"):
        balanced([1.0, cost], 1)


@pytest.mark.parametrize(("p", "rank"), [(3, 0), (2, 2), (2, -1), (0, 0)])
def test_ranks_that_do_not_fit_the_stages_are_refused(p, rank):
    with pytest.raises(ValueError, match=rf"4 stages on {p} ranks.*rank={rank}"):
        layers_of_rank([1, 1, 1, 1], p, rank)
