"""The example of a run that heals itself."""

import csv
from math import isnan

import sklearn.datasets  # noqa: F401  # its first import sets environment variables

from examples.self_healing import RUNS, main


def test_example_ends_in_the_weights_of_the_clean_run(tmp_path, capsys):
    outcomes, rollback = main(str(tmp_path), epochs=2)
    clean, broken, healed = (outcomes[name] for name in RUNS)
    assert rollback.rollbacks == 2  # the image comes once in each of the epochs
    assert isnan(broken.loss)
    assert clean.accuracy > 0.8
    assert (healed.loss, healed.accuracy) == (clean.loss, clean.accuracy)
    assert all(healed.weights[name].equal(value) for name, value in clean.weights.items())
    printed = capsys.readouterr().out
    assert "weights are those of the first, to the bit" in printed
    with open(tmp_path / "divergence.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["module"] for row in rows] == ["blocks.0.0"] * 2
    for row in rows:
        assert f"step {row['step']}; batches {row['batches']}; back_to_step {row['back_to_step']}" in printed
