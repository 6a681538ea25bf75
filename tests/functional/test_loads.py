import io
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.functional import load_drawing, loads
from lightning_hybrid.functional.load_drawing import loads_png
from lightning_hybrid.functional.loads import LoadHistory, Routed, added

EVEN = Routed((5, 5, 5, 5), (0, 0, 0, 0), 10, 10 * math.log(4))
ONE = Routed((0, 20, 0, 0), (0, 12, 0, 0), 20, 0.0)
NOTHING = Routed((0, 0, 0, 0), (0, 0, 0, 0), 0, 0.0)


def test_even_routing_and_a_single_expert_are_the_ends_of_each_scale():
    assert (EVEN.load, EVEN.imbalance, EVEN.dropped_share, EVEN.mean_entropy) == ([0.25] * 4, 1, 0, math.log(4))
    assert (ONE.load, ONE.imbalance, ONE.dropped_share, ONE.mean_entropy) == ([0, 1, 0, 0], 4, 0.6, 0)
    assert (NOTHING.load, NOTHING.imbalance, NOTHING.dropped_share, NOTHING.mean_entropy) == ([0] * 4, 0, 0, 0)


def test_sums_are_each_layers_own():
    both = added({"a": EVEN, "b": ONE}, {"b": EVEN, "c": ONE})
    assert both == {"a": EVEN, "b": Routed((5, 25, 5, 5), (0, 12, 0, 0), 30, EVEN.entropy), "c": ONE}


@given(number=st.integers(0, 70), most=st.sampled_from([2, 4, 8]))
def test_a_long_history_has_few_wide_windows_that_lose_nothing(number, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loads, "MOST_WINDOWS", most)
        history = LoadHistory()
        for step in range(1, number + 1):
            history.add(step, {"a": Routed((step, 1), (0, 0), 1, 0.0)})
    assert len(history.windows) <= most
    sums = [sum(range(a, b)) for a, b in _between([0, *(step for step, _ in history.windows)])]
    assert [layers["a"].counts[0] for _, layers in history.windows] == sums
    assert not number or history.windows[-1][0] == number
    assert len({layers["a"].counts[1] for _, layers in history.windows[:-1]}) <= 1  # equally wide, but for the last


def _between(steps):
    return [(a + 1, b + 1) for a, b in pairwise(steps)]


@pytest.mark.parametrize("steps", [[1], [50, 100, 130]])
def test_picture_is_a_png_of_layers_with_different_numbers_of_experts(steps):
    history, file = LoadHistory(), io.BytesIO()
    for step in steps:
        history.add(step, {"blocks.0": EVEN, "blocks.1": Routed((1, 2), (0, 0), 3, 1.0), "unused": NOTHING})
    history.add(steps[-1] + 1, {"blocks.0": NOTHING})
    loads_png(history, file)
    assert file.getvalue().startswith(b"\x89PNG")


def test_picture_of_many_layers_has_strips_of_the_most_uneven(monkeypatch):
    monkeypatch.setattr(load_drawing, "_MOST_LAYERS", 2)
    heights = []
    for layers in ({"a": ONE, "b": EVEN}, {"a": ONE, "b": EVEN, "c": EVEN, "d": EVEN}):
        history, file = LoadHistory(), io.BytesIO()
        history.add(7, layers)
        loads_png(history, file)
        heights.append(int.from_bytes(file.getvalue()[20:24], "big"))
    assert 0 < heights[1] - heights[0] < 100


def test_nothing_is_not_drawn():
    history = LoadHistory()
    history.add(1, {"a": NOTHING})
    with pytest.raises(ValueError, match="nothing to draw"):
        loads_png(history, io.BytesIO())
