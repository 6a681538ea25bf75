"""The example's badly conditioned least squares: natural gradients need a small part of the steps of the best SGD."""

from examples.natural_gradient import GRIDS, Run, Way, train

NATURAL, PROBLEM = Way("K-FAC", 0.1, 1e-4), "least squares"


def steps(way, limit):
    """Until it was enough; None if that took longer."""
    watch, module = train(Run(PROBLEM, way, seed=0), limit)
    assert len(watch.values) == len(module.losses) <= limit
    return len(watch.values) if watch.is_enough else None


def test_a_third_of_the_steps_of_the_best_sgd_are_enough():
    assert NATURAL in GRIDS[PROBLEM]
    number = steps(NATURAL, 50)
    assert number is not None
    for way in GRIDS[PROBLEM]:
        if way.arm == "SGD":
            assert steps(way, 3 * number) is None, way
