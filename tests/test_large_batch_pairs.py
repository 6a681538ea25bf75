"""Callbacks for large batches, in pairs and all together: every layout gives the numbers of one process."""

import pytest
from torch.testing import assert_close

from tests.combined import LAYOUTS, SETS, Layout, go_on_all, save_all, train_all
from tests.launch import run_trainers


@pytest.fixture(scope="module")
def expected():
    return dict(zip(SETS, train_all(Layout(), SETS), strict=True))


def test_every_set_of_callbacks_changes_the_weights(expected):
    sums = {float(sum(value.abs().sum() for value in weights.values())) for weights in expected.values()}
    assert len(sums) == len(SETS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_set_of_callbacks_gives_the_numbers_of_one_process(name, expected):
    layout = LAYOUTS[name]
    found = run_trainers(layout.size, train_all, layout, SETS, timeout=300)[0]
    for names, weights in zip(SETS, found, strict=True):
        about = " and ".join(names)
        assert_close(weights, expected[names], rtol=1e-9, atol=1e-12, msg=lambda text, at=about: f"{at}: {text}")


@pytest.mark.parametrize("name", ["one", *LAYOUTS])
def test_a_run_that_stopped_in_a_cycle_goes_on_as_if_it_had_not(name, tmp_path):
    """Case 32, and under another layout with as many replicas."""
    layout = LAYOUTS.get(name, Layout())
    uninterrupted = run_trainers(layout.size, save_all, layout, tmp_path, timeout=300)[0]
    resumed = run_trainers(layout.size, go_on_all, layout, tmp_path, timeout=300)[0]
    assert_close(resumed, uninterrupted, rtol=0, atol=0)
    if name == "pipeline":
        elsewhere = run_trainers(2, go_on_all, LAYOUTS["zero3"], tmp_path, timeout=300)[0]
        assert_close(elsewhere, uninterrupted, rtol=1e-9, atol=1e-12)
