import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.functional.timeline import OUTSIDE, Change, Timeline, group_modules

BLOCK = Change(1.0, "activations", "blocks.0.linear", 30)
STEP = Timeline(
    step=3,
    changes=[
        Change(0.0, "gradients", "blocks.0.linear", 7),
        Change(1.0, "recomputed", "inlet", 5),
        BLOCK,
        Change(2.0, "activations", "inlet", 10),
        Change(3.0, "activations", "", 4),
        Change(4.0, "activations", "blocks.0.linear", -30),
        Change(5.0, "offloaded", "inlet", 2),
        Change(5.5, "compressed", "inlet", 6),
    ],
    phases=[(1.0, "forward"), (3.5, "backward"), (6.0, "step")],
    seconds=8.0,
)


def test_levels_are_sums_of_changes():
    times, levels = STEP.levels({"inlet": "inlet", "blocks.0.linear": "blocks.0", "": OUTSIDE})
    assert times.tolist() == [0, 0, 1, 2, 3, 4, 5, 5.5, 8]
    assert {name: level.tolist() for name, level in levels.items()} == {
        "inlet": [0, 0, 0, 10, 10, 10, 10, 10, 10],
        "blocks.0": [0, 0, 30, 30, 30, 0, 0, 0, 0],
        OUTSIDE: [0, 0, 0, 0, 4, 4, 4, 4, 4],
        "gradients": [0, 7, 7, 7, 7, 7, 7, 7, 7],
        "recomputed": [0, 0, 5, 5, 5, 5, 5, 5, 5],
        "offloaded": [0, 0, 0, 0, 0, 0, 2, 2, 2],
        "compressed": [0, 0, 0, 0, 0, 0, 0, 6, 6],
    }


def test_modules_stand_in_the_order_in_which_they_save_anything():
    assert list(STEP.kept().items()) == [("inlet", 10), ("blocks.0.linear", 30), ("", 4)]
    assert STEP.spans() == [("forward", 1.0, 3.5), ("backward", 3.5, 6.0), ("step", 6.0, 8.0)]


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=60), st.integers(1, 20))
def test_few_columns_show_the_peak_and_the_ends(sizes, columns):
    changes = [Change(float(i), "activations", "a", size) for i, size in enumerate(sizes)]
    times, levels = Timeline(changes=changes, seconds=float(len(sizes))).levels({"a": "a"}, columns)
    totals = np.cumsum(sizes)
    assert levels["a"][1:].max() == totals.max()
    assert (levels["a"][0], levels["a"][-1]) == (0, totals[-1])
    assert len(times) <= columns + 2
    assert (np.diff(times) >= 0).all()


def test_a_list_of_blocks_is_shown_as_its_blocks():
    blocks = {f"model.layers.{i}.{part}": 10 for i in range(4) for part in ("attention", "mlp")}
    groups = group_modules({"model.embed": 1, **blocks, "head": 50, "": 90})
    assert groups == {
        "model.embed": "model.embed",
        **{name: name.rpartition(".")[0] for name in blocks},
        "head": "head",
        "": OUTSIDE,
    }
    assert set(group_modules(blocks, depth=2).values()) == {"model.layers"}
    assert group_modules({}) == {}
    assert group_modules({"": 3}) == {"": OUTSIDE}


def test_neighbours_share_a_group_where_there_are_too_many():
    groups = group_modules({**{f"blocks.{i}": 10 for i in range(48)}, "": 5}, most=12)
    assert list(dict.fromkeys(groups.values())) == [
        *(f"blocks.{i} ... blocks.{i + 3}" for i in range(0, 48, 4)),
        OUTSIDE,
    ]


@given(st.lists(st.integers(0, 100), min_size=1, max_size=60), st.integers(1, 12))
def test_there_are_never_more_groups_than_asked_for(sizes, most):
    groups = group_modules({f"b{i}": size for i, size in enumerate(sizes)}, most=most)
    assert len(set(groups.values())) <= max(most, 1)
    assert len(groups) == len(sizes)
