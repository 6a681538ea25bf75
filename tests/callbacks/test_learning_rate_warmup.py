"""Warm-up by steps, epochs and samples: the factor of each step, in every layout, and across an interruption."""

import csv

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateFinder, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader, IterableDataset

from lightning_hybrid.callbacks import LearningRateScaling, LearningRateWarmup
from lightning_hybrid.callbacks.rate_factors import RateFactors
from lightning_hybrid.functional.rates import warmup_value
from tests.callbacks.rates import BATCH, BATCHES, Net, fitted
from tests.launch import run_trainers
from tests.precision.test_fp16 import Poisoned, plugin
from tests.small import WIDTH, fit, hybrid, loader, trainer_of

NO_RATE = {"log": False}


def cosine(step, rate):
    return rate * (1 + torch.cos(torch.tensor(step * torch.pi / 10, dtype=torch.float64)).item()) / 2


def table(factors):
    """Rates of both groups under the cosine of `Net`, multiplied."""
    return [
        [pytest.approx(factor * cosine(step, rate)) for rate in (0.02, 0.04)] for step, factor in enumerate(factors)
    ]


def factors_of(callback, **options):
    """What multiplied the rate of each step."""
    effective, _ = fitted(Net(), [callback], **options)
    return [pair[0] / cosine(step, 0.02) for step, pair in enumerate(effective)]


def test_factor_rises_in_a_line_and_groups_and_schedule_stay_as_they_are():
    effective, found = fitted(Net(), [LearningRateWarmup(steps=4, start_factor=0.2)])
    factors = [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]
    assert effective == table(factors)
    torch.manual_seed(0)
    module = Net()
    module.configure_optimizers = lambda: by_hand(Net.configure_optimizers(module)["optimizer"], factors)
    _, expected = fitted(module, [])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def by_hand(optimizer, factors):
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [*factors, 0][step] * cosine(step, 1.0))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize(
    ("length", "options", "expected"),
    [
        ({"epochs": 0.5}, {}, [0, 1 / 3, 2 / 3, 1, 1, 1]),
        ({"epochs": 1}, {"accumulate_grad_batches": 4, "max_epochs": 2}, [0, 1 / 2, 1, 1]),
        ({"epochs": 1.5}, {"limit_train_batches": 2, "max_epochs": 2}, [0, 1 / 3, 2 / 3, 1]),
        ({"samples": 16}, {}, [0, 1 / 4, 2 / 4, 3 / 4, 1, 1]),
        ({"samples": 40}, {"accumulate_grad_batches": 4, "max_epochs": 2}, [0, 16 / 40, 24 / 40, 1]),
        ({"samples": 30}, {"batch": 5}, [0, 5 / 30, 10 / 30, 15 / 30, 20 / 30]),
        ({"samples": 40}, {"batch": 10, "max_epochs": 2}, [0, 10 / 40, 20 / 40, 24 / 40, 34 / 40, 1]),
    ],
)
def test_length_in_epochs_and_samples(length, options, expected):
    """Short windows and short batches are steps, with the samples that they have."""
    assert factors_of(LearningRateWarmup(**length, **NO_RATE), **options) == pytest.approx(expected)


def test_one_that_is_longer_than_the_fit_is_told(caplog):
    told = "LearningRateWarmup: {} steps of warm-up are more than the {} of this fit"
    for length, options, numbers in (
        ({"steps": 13}, {"max_epochs": 2}, (13, 12)),
        ({"steps": 12}, {"max_epochs": 2}, None),
        ({"epochs": 2}, {"max_steps": 4, "max_epochs": 3}, (12, 4)),
        ({"epochs": 3}, {"accumulate_grad_batches": 4, "max_epochs": 2}, (6, 4)),
    ):
        caplog.clear()
        with caplog.at_level("INFO"):
            fitted(Net(), [LearningRateWarmup(**length, **NO_RATE)], **options)
        lines = [each.message for each in caplog.records if "LearningRateWarmup" in each.message]
        assert [line.partition(", in")[0] for line in lines] == ([told.format(*numbers)] if numbers else [])


def test_epochs_follow_an_accumulation_that_changes():
    steps = GradientAccumulationScheduler({0: 3, 1: 2})
    effective, _ = fitted(Net(), [steps, LearningRateWarmup(epochs=2)], max_epochs=2)
    assert effective == table([0, 0.2, 0.4, 0.6, 0.8])


def test_momentum_rises_with_the_rate_to_the_groups_own():
    seen = []

    class Watched(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            handle = optimizer.optimizer.register_step_pre_hook(
                lambda optimizer, *_: seen.append(optimizer.param_groups[0]["momentum"])
            )
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            handle.remove()

    fitted(Watched(), [LearningRateWarmup(steps=4, momentum=0.5)])
    assert seen == pytest.approx([0.5, 0.6, 0.7, 0.8, 0.9, 0.9])


LAYOUTS = {"ddp": "ddp", "zero 3": {"pipeline": 1, "zero_stage": 3}}
GRID = {"pipeline 2 x data 2": {"pipeline": 2}}
BOTH = {"accumulate_grad_batches": 2, "max_epochs": 2}


def both():
    return [LearningRateScaling(2, rule="sqrt"), LearningRateWarmup(samples=40, start_factor=0.1, momentum=0.3)]


def interrupted(layouts, folder, size=1):
    """On a rank: without interruption, and from a step within the warm-up on."""
    found = []
    for name, layout in layouts.items():
        data = size if isinstance(layout, str) else size // layout["pipeline"]
        runs = []
        for options in ({"save": folder / name}, {"resume": folder / name / "epoch=0.ckpt"}):
            strategy = layout if isinstance(layout, str) else hybrid(**layout)
            runs.append(fitted(Net("Lars"), both(), strategy, data, **BOTH, **options))
        found.append(runs)
    return found


def test_layouts_have_the_rates_and_weights_of_one_process_and_go_on_exactly(tmp_path):
    """Case 32. In the buffers of `Lars`, which are DTensors under zero 3, the rate is corrected."""
    ((reference, resumed),) = interrupted({"one process": "auto"}, tmp_path)
    assert reference[0] == table([2 * warmup_value(0.1, 1, min(8 * k / 40, 1)) for k in range(6)])
    others = run_trainers(2, interrupted, LAYOUTS, tmp_path, 2)[0] + run_trainers(4, interrupted, GRID, tmp_path, 4)[0]
    for whole, rest in [(reference, resumed), *others]:
        assert whole[0] == reference[0]
        torch.testing.assert_close(whole[1], reference[1], rtol=1e-9, atol=1e-12)
        assert rest[0] == whole[0][3:]
        assert all(torch.equal(value, rest[1][name]) for name, value in whole[1].items())


def skipping(folder):
    """On a rank: the rates of steps, of which the one of the second batch overflows."""
    return fitted(Poisoned(), [LearningRateWarmup(steps=4, momentum=0.5)], hybrid(2), batch=6, plugins=[plugin()])[0]


def test_steps_that_are_skipped_do_not_advance_it(tmp_path):
    """Case 10: `Poisoned` warms up too, by a schedule of (step + 1) / 8."""
    (effective, _) = run_trainers(2, skipping, tmp_path)
    assert effective == [[pytest.approx(0.01 * (step + 1) / 8 * step / 4)] for step in range(3)]


class Overflowing(Net):
    """In the second batch a gradient is not finite."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (float("inf") if batch_idx == 1 else 1)


def test_steps_that_torchs_scaler_skips_do_not_advance_it_in_samples_either():
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
    for length in ({"steps": 5}, {"samples": 5 * BATCH}):
        effective, _ = fitted(Overflowing(), [LearningRateWarmup(**length)], plugins=plugins)
        # Lightning's schedule goes on where its scaler skips: issue 16228
        expected = [step / 5 * cosine(batch, 0.02) for step, batch in enumerate((0, 2, 3, 4, 5))]
        assert [pair[0] for pair in effective] == pytest.approx(expected)


def test_two_warmups_multiply_and_each_goes_on(tmp_path):
    def two():
        return [LearningRateWarmup(steps=8, start_factor=0.5), LearningRateWarmup(epochs=1, start_factor=0.25)]

    whole, _ = fitted(Net(), two(), max_epochs=2, save=tmp_path)
    rest, _ = fitted(Net(), two(), max_epochs=2, resume=tmp_path / "epoch=0.ckpt")
    factors = [warmup_value(0.5, 1, min(k / 8, 1)) * warmup_value(0.25, 1, min(k / 6, 1)) for k in range(12)]
    assert whole == table(factors)
    assert rest == whole[6:]


def test_changed_arguments_keep_the_count(tmp_path):
    fitted(Net(), [LearningRateWarmup(steps=3)], save=tmp_path)
    with pytest.warns(UserWarning, match="callbacks used to create the checkpoint"):
        rest, _ = fitted(Net(), [LearningRateWarmup(steps=8)], max_epochs=2, resume=tmp_path / "epoch=0.ckpt")
    assert rest == table([*[0] * 6, 6 / 8, 7 / 8, 1, 1, 1, 1])[6:]


def test_fits_of_one_optimizer_go_on_and_others_begin():
    module, callback = Net(), LearningRateWarmup(samples=10 * BATCH)
    configured = torch.optim.SGD(module.parameters(), 1.0)
    module.configure_optimizers = lambda: configured
    found = [fitted(module, [callback])[0] for _ in range(2)]
    assert [rate for (rate,) in found[0] + found[1]] == pytest.approx([min(k / 10, 1) for k in range(12)])
    assert fitted(Net(), [callback])[0] == table([k / 10 for k in range(6)])
    plain, _ = fitted(module, [])
    assert plain == [[1.0]] * 6  # nothing has stayed


class Found(Net):
    def __init__(self):
        super().__init__()
        self.lr = 0.5

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


@pytest.mark.parametrize("first", [True, False])
def test_steps_of_a_search_for_the_rate_do_not_count(first, tmp_path):
    search = LearningRateFinder(1e-6, 1e-3, num_training_steps=9, early_stop_threshold=None, update_attr=False)
    callbacks = [search, LearningRateWarmup(steps=4)]
    effective, _ = fitted(Found(), callbacks[:: 1 if first else -1], default_root_dir=tmp_path)
    assert [rate for (rate,) in effective] == pytest.approx([0.5 * min(k / 4, 1) for k in range(6)])


class ByHand(Net):
    """Two optimizers, of which the second steps in every other batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 1.0) for part in (self.inlet, self.outlet)]

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.manual_backward(self.loss(batch) * 1e-3)
        first.step()
        if batch_idx % 2:
            second.step()


def test_each_of_several_optimizers_counts_its_own_steps(tmp_path):
    logger = CSVLogger(tmp_path, "", "")
    options = {"logger": logger, "log_every_n_steps": 1}
    fit(ByHand(), loader(BATCHES * BATCH, BATCH), callbacks=[LearningRateWarmup(steps=4, start_factor=0.5)], **options)
    last = logged(tmp_path)[-1]
    assert last["learning_rate/SGD-0"] == pytest.approx(1)
    assert last["learning_rate/SGD-1"] == pytest.approx(0.5 + 0.5 * 2 / 4)


def logged(folder):
    with open(folder / "metrics.csv") as file:
        return [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]


def test_log_has_the_rates_of_steps_and_the_monitor_those_of_the_schedule(tmp_path):
    callbacks = [LearningRateWarmup(steps=4), LearningRateScaling(2), LearningRateMonitor()]
    logger = CSVLogger(tmp_path, "", "")
    fit(Net(), loader(BATCHES * BATCH, BATCH), callbacks=callbacks, logger=logger, log_every_n_steps=2)
    rows = logged(tmp_path)
    for number, rate in enumerate((0.02, 0.04)):
        found = [row[f"learning_rate/SGD/{number}"] for row in rows if f"learning_rate/SGD/{number}" in row]
        assert found == pytest.approx(
            [2 * factor * cosine(step, rate) for step, factor in ((1, 0.25), (3, 0.75), (5, 1))]
        )
        found = [row[f"lr-SGD/pg{number + 1}"] for row in rows if f"lr-SGD/pg{number + 1}" in row]
        assert found == pytest.approx([cosine(step, rate) for step in (1, 3, 5)])


class Failing(Net):
    def backward(self, loss):
        raise OSError("no gradient")


def test_nothing_stays_after_a_step_that_fails():
    module, callback = Failing(), LearningRateWarmup(steps=4, start_factor=0.5)
    with pytest.raises(OSError, match="no gradient"):
        fit(module, loader(8, 4), callbacks=[callback])
    optimizer = module.optimizers(use_pl_optimizer=False)
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.04]
    optimizer.step()
    assert RateFactors.of(optimizer).effective_rates == [0.02, 0.04]


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(WIDTH, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)


class Still(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Rateless(Net):
    def configure_optimizers(self):
        return None


@pytest.mark.parametrize(
    ("module", "callback", "message"),
    [
        (Net(), LearningRateWarmup(epochs=1), "training loader has no length. Set limit_train_batches, or give steps"),
        (ByHand(), LearningRateWarmup(epochs=1), "how many steps an epoch has where the LightningModule optimizes man"),
        (Still(), LearningRateWarmup(2, momentum=0.5), "Group 0 of SGD has neither betas nor a momentum above 0"),
        (Rateless(), LearningRateWarmup(2), "has returned no optimizer whose learning rate LearningRateWarmup could"),
    ],
)
@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_what_cannot_be_is_refused_before_training(module, callback, message):
    trainer = trainer_of(callbacks=[callback], max_steps=3)
    before = [parameter.clone() for parameter in module.parameters()]
    with pytest.raises(ValueError, match=message):
        trainer.fit(module, DataLoader(Endless(), 2))
    assert all(torch.equal(mine, its) for mine, its in zip(module.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"Give one of steps, epochs and samples as the length of the warm-up, not none"),
        ({"steps": 1, "samples": 8}, r"not \{'steps': 1, 'samples': 8\}"),
        ({"steps": 0}, "steps=0 must be a whole number of at least 1"),
        ({"samples": 1.5}, "samples=1.5 must be a whole number"),
        ({"epochs": -1}, "epochs=-1 must be a finite number above 0"),
        ({"epochs": True}, "epochs=True must be a finite number"),
        ({"steps": 1, "start_factor": 1.5}, "start_factor=1.5 must be from 0 to 1"),
        ({"steps": 1, "start_factor": "0"}, "start_factor='0' must be from 0 to 1"),
        ({"steps": 1, "momentum": 1}, "momentum=1 must be from 0 to below 1, or None"),
        ({"steps": 1, "log": "no"}, "log='no' must be True or False"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LearningRateWarmup(**arguments)
