"""The example of large batches: its data, how it chooses rates, and that what it says follows from the numbers."""

import pytest
import torch
from sklearn.datasets import load_digits  # its first import sets environment variables

from examples.digits import PARTS, Shuffled, parts
from examples.large_batch import ARMS, Result, Run, main, outcome, plan, rates, train
from examples.outcomes import LARGE, SMALL, Entry, Outcome, conclusion
from tests.launch import run_trainers


def test_every_digit_is_in_one_part_and_all_classes_in_each_alike():
    dealt = parts()
    assert {name: len(images) for name, images in dealt.items()} == PARTS
    everything = torch.cat([part.images.flatten(1) for part in dealt.values()])
    found = torch.tensor(load_digits().data, dtype=torch.float32)
    assert (8 * everything + 8).unique(dim=0).equal(found.unique(dim=0))
    assert len(everything) == len(found)
    for part in dealt.values():
        counts = part.classes.bincount(minlength=10) / len(part)
        torch.testing.assert_close(counts, torch.full((10,), 0.1), rtol=0, atol=0.006)  # 174 to 183 images a class


def test_every_image_comes_once_an_epoch_in_a_new_order():
    order = torch.tensor(list(Shuffled(20, 3, seed=1))).view(3, 20)
    assert order.sort(dim=1).values.tolist() == [list(range(20))] * 3
    assert len(order.unique(dim=0)) == 3
    assert order.flatten().tolist() == list(Shuffled(20, 3, seed=1)) != list(Shuffled(20, 3, seed=2))


@pytest.mark.parametrize(("arm", "factor"), [("SGD", 32), ("LARS", 32), ("AdamW", 32**0.5), ("LAMB", 32**0.5)])
def test_rates_are_scaled_with_the_batch(arm, factor):
    small, large = rates(arm, SMALL, 5), rates(arm, LARGE, 5)
    assert small[2] == ARMS[arm].rate
    assert large == pytest.approx([rate * factor for rate in small])


def test_rates_are_chosen_by_loss_without_a_look_at_the_test():
    losses = {SMALL: (0.5, 0.2, 0.4), LARGE: (0.3, float("inf"), 0.6)}
    results = {}
    for i, run in enumerate(plan("SGD", 4, num_seeds=2, num_rates=3)):
        results[run] = Result(losses[run.batch][i // 2 % 3] + 0.01 * run.seed, accuracy=i / 100)
    small, scaled, tuned = outcome(results)
    assert small == Entry(0.05, [0.02, 0.03])
    assert scaled == Entry(pytest.approx(1.6), [0.08, 0.09])
    assert tuned == Entry(pytest.approx(1.6 / 3), [0.06, 0.07], is_last=True)


def entries(small, tuned):
    return Outcome(Entry(0.1, small), Entry(1.0, [0.1]), Entry(2.0, tuned))


def test_conclusion_is_made_of_the_numbers():
    found = {
        "SGD": entries([0.97, 0.99], [0.90, 0.92]),
        "LAMB": entries([0.96, 0.98], [0.96, 0.97]),
        "LARS": entries([0.96, 0.97], [0.91, 0.93]),
        "SM3": entries([0.95, 0.96], [0.88, 0.89]),
    }
    best, closed, against = conclusion(found).splitlines()
    assert "SGD, 98.0%; with 1,024: LAMB, 96.5%" in best
    assert closed.endswith("with 32: LAMB. Percentage points lost by the others: LARS 4.5, SGD 7.0, SM3 7.0.")
    assert against.endswith("from any: LAMB; worse: SM3.")
    swapped = found | {"SGD": found["LAMB"], "LAMB": found["SGD"]}
    assert "with 1,024: SGD" in conclusion(swapped)
    assert "against" not in conclusion({"LAMB": found["LAMB"]})
    assert len(conclusion({"LAMB": found["LAMB"]}).splitlines()) == 2


def test_example_prints_a_row_for_each_optimizer_and_draws_them(tmp_path, capsys):
    outcomes = main(["SGD", "LAMB"], epochs=2, num_seeds=1, num_rates=1, folder=str(tmp_path))
    assert list(outcomes) == ["SGD", "LAMB"]
    for found in outcomes.values():
        assert found.small.mean > 0.8
        assert found.small.mean > found.tuned.mean == found.scaled.mean
    printed = capsys.readouterr().out
    assert [line.split("|")[1].strip() for line in printed.splitlines() if line.endswith("|")][2:] == ["SGD", "LAMB"]
    assert conclusion(outcomes) in printed
    assert (tmp_path / "large_batch.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arm", ARMS)
def test_every_optimizer_learns(arm):
    (rate,) = rates(arm, 128, 1)
    result = train(Run(arm, 128, rate, seed=0, epochs=2))
    assert result.loss < 2.0  # ln 10 = 2.3 knows nothing
    assert result.accuracy > 0.3


def by_strategy(strategy):
    return train(Run("LAMB", LARGE, 0.1, seed=0, epochs=2), strategy)


def test_a_strategy_trains_the_same():
    (hybrid,) = run_trainers(1, by_strategy, "hybrid_ptdp")
    assert hybrid == pytest.approx(by_strategy("auto"), rel=1e-4)
