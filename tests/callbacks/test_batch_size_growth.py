"""Batches that grow are those that a loop written by hand is given, in every layout and after a stop."""

import math
import warnings
from copy import deepcopy

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.optim.lr_scheduler import MultiStepLR
from torch.testing import assert_close
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from lightning_hybrid.callbacks import BatchSizeGrowth, LearningRateScaling
from lightning_hybrid.callbacks.rate_factors import RateFactors
from tests.callbacks.rates import Saving as SavingEpochs
from tests.launch import run_trainers
from tests.small import Small, hybrid, loader, samples, trainer_of, weights
from tests.test_resuming import Stateful

SAMPLES, BATCH = 32, 4
GROWTH = {"milestones": {1: 2, 2: 4}, "max_batch": 16}  # 4 samples a step, then 8, then 16 and half of the rate
PLAN = [(4, 1.0)] * 8 + [(8, 1.0)] * 4 + [(16, 0.5)] * 2


class Net(Small):
    depth = 2


class Seen(Callback):
    """Batch and rate factor of each applied step, where windows begin, and what is logged."""

    def __init__(self):
        self.steps, self.logged, self.count = [], [], 0

    def on_train_start(self, trainer, pl_module):
        self.count = RateFactors.of(trainer.optimizers[0]).steps

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        factors = RateFactors.of(trainer.optimizers[0])
        if factors.steps > self.count:
            self.count = factors.steps
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            self.steps.append((metrics["global_batch_size"], factors.effective_rates[0] / 0.02))
            self.logged.append(metrics)


def fitted(callback, strategy="auto", data=1, module=None, train=None, **options):
    """A fit; what its steps had, and the weights at its end."""
    seen, others = Seen(), options.pop("others", [])
    options = {"max_epochs": 3, "log_every_n_steps": 1, **options}
    resume = options.pop("resume", None)
    trainer = trainer_of(strategy, callbacks=[callback, *others, seen], **options)
    train = loader(SAMPLES, BATCH, data) if train is None else train
    trainer.fit(module or Net(), train, ckpt_path=resume)
    return seen, dict(weights(trainer))


def by_hand(plan, module=None):
    """Weights after the steps of a plan, (samples, factor of the rate), written without Lightning."""
    module, (x, y), start = module or Net(), samples(SAMPLES).tensors, 0
    optimizer = torch.optim.SGD(module.parameters(), 0.02, momentum=0.9)
    for size, factor in plan:
        optimizer.param_groups[0]["lr"] = 0.02 * factor
        optimizer.zero_grad()
        module.loss((x[start : start + size], y[start : start + size])).backward()
        optimizer.step()
        start = (start + size) % SAMPLES
    return dict(module.state_dict())


def test_growth_is_the_same_batches_given_directly_and_then_rates_fall():
    seen, found = fitted(BatchSizeGrowth(**GROWTH))
    assert seen.steps == PLAN
    assert_close(found, by_hand(PLAN), rtol=1e-12, atol=1e-14)


STRATEGIES = {
    "ddp": (2, 2, lambda: "ddp"),
    "plain": (1, 1, lambda: hybrid(1, microbatches=1)),  # one process that accumulates later only
    "micro-batches": (1, 1, lambda: hybrid(1)),
    "zero3": (2, 2, lambda: hybrid(1, zero_stage=3)),
    "pipeline": (4, 2, hybrid),
}


def grown_in(name):
    _, data, make = STRATEGIES[name]
    seen, found = fitted(BatchSizeGrowth(**GROWTH), make(), data, use_distributed_sampler=False)
    return seen.steps, found


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_layout_gives_the_numbers_of_the_loop_by_hand(name):
    steps, found = run_trainers(STRATEGIES[name][0], grown_in, name)[0]
    assert steps == PLAN
    assert_close(found, by_hand(PLAN), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("milestones", "plan"),
    [
        ([3], [(4, 1.0)] * 4 + [(8, 1.0)] * 10),  # after three steps the fourth batch is alone
        ({1: 2, 2: 4}, [(4, 1.0)] * 2 + [(8, 1.0)] * 3 + [(32, 1.0)] * 2),  # a window of eight is an epoch
    ],
)
def test_a_level_begins_with_the_first_window_that_is_not_short(milestones, plan):
    seen, found = fitted(BatchSizeGrowth(milestones, interval="step"))
    assert seen.steps == plan
    assert_close(found, by_hand(plan), rtol=1e-12, atol=1e-14)


class Saving(Callback):
    """Saves within the second epoch, after a step, or where one is half done."""

    def __init__(self, path, batch_idx):
        self.path, self.batch_idx = path, batch_idx

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (1, self.batch_idx):
            trainer.save_checkpoint(self.path, weights_only=False)


class Sized(Stateful):
    """Says how large its batches are, and begins each epoch anew."""

    batch_size = BATCH

    def __iter__(self):
        self.position %= len(self)
        return super().__iter__()


def stopped_and_resumed(folder, batch_idx, strategy):
    found = []
    for others, resume in (([Saving(folder / "middle.ckpt", batch_idx)], None), ([], folder / "middle.ckpt")):
        make = strategy() if callable(strategy) else strategy
        train = Sized(loader(SAMPLES, BATCH)) if make == "auto" else None
        found.append(fitted(BatchSizeGrowth(**GROWTH), make, train=train, others=others, resume=resume))
    return [(seen.steps, weights) for seen, weights in found]


@pytest.mark.parametrize(("strategy", "batch_idx"), [("auto", 3), (hybrid, 3), (hybrid, 4)])
def test_a_run_that_stopped_in_an_epoch_goes_on_to_the_bit(strategy, batch_idx, tmp_path):
    """After a window, and in the middle of one."""
    ranks = 1 if strategy == "auto" else 2
    (_, whole), (steps, found) = run_trainers(ranks, stopped_and_resumed, tmp_path, batch_idx, strategy)[0]
    assert steps == PLAN[10:]
    assert_close(found, whole, rtol=0, atol=0)


def in_layout(folder, data, resume):
    """Saved with one replica of four samples a batch, and gone on with two of two or of four."""
    batch, path = BATCH * (2 if resume == "doubled" else 1), folder / "middle.ckpt"
    train = DataLoader(samples(SAMPLES), batch // data)
    others = [] if resume else [Saving(path, 3)]
    options = {"resume": path if resume else None, "others": others, "train": train}
    seen, found = fitted(BatchSizeGrowth(**GROWTH), hybrid(1, microbatches=1), **options)
    return seen.steps, found


@pytest.mark.parametrize("resume", ["same", "doubled"])
def test_a_run_goes_on_with_more_replicas_and_the_same_batches(resume, tmp_path):
    run_trainers(1, in_layout, tmp_path, 1, "")
    steps, found = run_trainers(2, in_layout, tmp_path, 2, resume)[0]
    assert steps == PLAN[10:]
    assert_close(found, by_hand(PLAN), rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_stock_strategies_do_not_go_on_within_an_epoch_with_other_batches(tmp_path):
    """Their place counts batches: half as large, they would train on the same samples again."""
    path, train = tmp_path / "middle.ckpt", DataLoader(samples(SAMPLES), BATCH // 2)
    fitted(BatchSizeGrowth(**GROWTH), others=[Saving(path, 3)])
    with pytest.raises(
        ValueError, match=r"middle of an epoch, after 4 batches of 4 samples .* Now they have 2, and Single"
    ):
        fitted(BatchSizeGrowth(**GROWTH), train=train, resume=path)


class GoingBack(Callback):
    """After the batch that ends an epoch, gives the growth what it had after an earlier one."""

    def __init__(self, growth):
        self.growth, self.kept, self.found = growth, None, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (1, 7):
            self.kept = deepcopy(self.growth.state_dict())
        if (trainer.current_epoch, batch_idx) == (2, 7):
            self.growth.load_state_dict(self.kept)
            factors = RateFactors.of(trainer.optimizers[0])
            self.found = [trainer.accumulate_grad_batches, self.growth.level, factors.steps]
            optimizer = trainer.optimizers[0]
            optimizer.step()
            self.found.append(factors.effective_rates[0])


def test_a_state_takes_effect_at_once_within_a_fit():
    growth = BatchSizeGrowth({1: 2, 2: 4}, max_batch=16)
    back = GoingBack(growth)
    fitted(growth, others=[back])
    assert back.found == [2, 1, 12, 0.02]


class Validated(Net):
    """Its validation has values that are given."""

    values = (5.0, 4.0, 4.5, 4.2, 3.0, 3.5, 3.5, 3.5)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.tensor(self.values[self.current_epoch]).double(), batch_size=1)

    def val_dataloader(self):
        return loader(4, 4)


def test_a_batch_grows_when_a_value_stops_to_improve_and_beyond_its_largest_the_rate_falls(tmp_path):
    growth = BatchSizeGrowth(on_plateau="val_loss", patience=2, max_batch=12)
    options = {"others": [SavingEpochs(tmp_path)], "enable_checkpointing": True}
    seen, whole = fitted(growth, module=Validated(), max_epochs=8, **options)
    assert seen.steps == [(4, 1.0)] * 32 + [(8, 1.0)] * 12 + [(12, 0.75)] * 3
    resumed = BatchSizeGrowth(on_plateau="val_loss", patience=2, max_batch=12)
    rest, found = fitted(resumed, module=Validated(), max_epochs=8, resume=tmp_path / "epoch=2.ckpt")
    assert rest.steps == seen.steps[24:]
    assert_close(found, whole, rtol=0, atol=0)
    again, _ = fitted(growth, module=Validated(), max_epochs=5)  # a new fit begins anew
    assert again.steps == [(4, 1.0)] * 32 + [(8, 1.0)] * 4


class Apart(Validated):
    """Its values stop to improve on the first rank alone; their mean does so one epoch later."""

    def validation_step(self, batch, batch_idx):
        own = [(4.0, 5.0, 5.0), (4.0, 2.0, 4.0)][self.global_rank][self.current_epoch]
        self.log("val_loss", torch.tensor(own), batch_size=1)


def grown_apart():
    growth = BatchSizeGrowth(on_plateau="val_loss", patience=1, max_batch=8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*recommended to use `self.log")
        seen, _ = fitted(growth, "ddp", 2, Apart(), max_epochs=3, use_distributed_sampler=False)
    return growth.state_dict()["progress"], seen.steps


def test_replicas_grow_together_by_the_mean_of_what_they_have():
    (first, steps), (second, others) = run_trainers(2, grown_apart)
    assert first == second
    assert (first["best"], first["grown"]) == (3.5, 1)
    assert steps == others == [(4, 1.0)] * 24


class Reloading(Net):
    """Its loader has batches of four, and then of eight."""

    def train_dataloader(self):
        return loader(SAMPLES, 4 if self.current_epoch < 2 else 8)


def test_loaders_that_change_are_accumulated_to_the_same_batches():
    seen = Seen()
    options = {"max_epochs": 3, "log_every_n_steps": 1, "reload_dataloaders_every_n_epochs": 1}
    trainer = trainer_of(callbacks=[BatchSizeGrowth([1]), seen], **options)
    trainer.fit(Reloading())
    plan = [(4, 1.0)] * 8 + [(8, 1.0)] * 8
    assert seen.steps == plan
    assert_close(dict(weights(trainer)), by_hand(plan), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("cap", [None, 8])
def test_noise_scale_is_that_of_the_schedule_in_each_step(cap):
    growth = BatchSizeGrowth.from_lr_schedule([1, 2], gamma=0.5, max_batch=cap)
    seen, _ = fitted(growth)
    found = [(batch, metrics["noise_scale"]) for (batch, _), metrics in zip(seen.steps, seen.logged, strict=True)]
    sizes = [(4, 8), (8, 4), (8, 4) if cap else (16, 2)]
    expected = [
        (b, 0.02 * 0.5**epoch * SAMPLES / (BATCH * (1 - 0.9))) for epoch, (b, n) in enumerate(sizes) for _ in range(n)
    ]
    assert [batch for batch, _ in found] == [batch for batch, _ in expected]
    assert [noise for _, noise in found] == pytest.approx(
        [noise for _, noise in expected], rel=1e-6
    )  # logs are float32
    assert seen.steps[-1] == ((8, 0.5) if cap else (16, 1.0))


def test_schedules_are_those_of_torch():
    mapping = BatchSizeGrowth.from_lr_schedule({2: 0.5, 4: 0.25}).plan
    assert mapping == BatchSizeGrowth.from_lr_schedule([2, 4], gamma=0.5).plan
    assert mapping == BatchSizeGrowth.from_lr_schedule(2, gamma=0.5, length=6).plan
    assert mapping.milestones == {2: 2.0, 4: 2.0}


class Tokens(Net):
    def loss(self, batch):
        ids, x, y = batch
        return super().loss((x, y)) + 0 * ids.sum()


def test_a_largest_batch_in_tokens_is_that_of_the_first_batchs_tokens():
    """Fifty tokens are ten samples of five, and two loader batches of four."""
    data = DataLoader(TensorDataset(torch.arange(SAMPLES * 5).view(-1, 5), *samples(SAMPLES).tensors), BATCH)
    seen, found = fitted(BatchSizeGrowth([1, 2], max_batch=50, unit="tokens"), module=Tokens(), train=data)
    plan = [(4, 1.0)] * 8 + [(8, 1.0)] * 4 + [(8, 0.5)] * 4
    assert seen.steps == [(5 * samples, factor) for samples, factor in plan]
    assert_close(found, by_hand(plan), rtol=1e-12, atol=1e-14)


def test_what_begins_is_told_and_the_trainer_has_its_own_accumulation_afterwards(caplog):
    trainer = trainer_of(callbacks=[BatchSizeGrowth([1], factor=3)], max_epochs=2)
    trainer.fit(Net(), loader(SAMPLES, BATCH))
    assert (
        "BatchSizeGrowth: from epoch 1, batch 0 on, a global batch of 12 samples (before: 4) = 4 x 3 accumulated x 1 "
        "replicas; learning rates x 1; the last step of an epoch has 2 of 3 batches"
    ) in caplog.text
    assert trainer.accumulate_grad_batches == 1


class ByHand(Net):
    automatic_optimization = False


class Scheduled(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [MultiStepLR(optimizer, [1], 0.5)]


class OwnBackward(Net):
    def backward(self, loss):
        loss.backward()


class Endless(IterableDataset):
    def __iter__(self):
        return iter([samples(4).tensors])


class Batches:
    """A batch sampler that does not say how large its batches are."""

    def __iter__(self):
        return iter(BatchSampler(range(8), 4, False))

    def __len__(self):
        return 2


@pytest.mark.parametrize(
    ("growth", "options", "message"),
    [
        ({"milestones": [1]}, {"module": ByHand()}, "ByHand optimizes manually"),
        (
            {"milestones": [1]},
            {"others": [GradientAccumulationScheduler({1: 2})]},
            "GradientAccumulationScheduler sets accumulate_grad_batches too",
        ),
        ({"milestones": [1]}, {"others": [LearningRateScaling(4)]}, "LearningRateScaling makes rates follow"),
        ({"milestones": [1]}, {"train": [loader(8, 4), loader(8, 4)]}, "has batches of 2 loaders"),
        ({"milestones": [1]}, {"train": DataLoader(samples(8), batch_sampler=Batches())}, "does not say how many"),
        ({"milestones": [1]}, {"train": DataLoader(Endless(), None)}, "does not say how many samples"),
        ({"milestones": [1], "factor": 1.5}, {}, "from 4 samples by 1.5, would give 6, which is no whole number"),
        ({"milestones": [1], "max_batch": 3}, {}, "max_batch=3.: the batch begins with 4 already"),
        ({"milestones": [1], "factor": 9}, {}, "a batch of 36 samples is more than an epoch has, 8 x 4"),
        ({"on_plateau": "val_loss", "max_batch": 8}, {}, "counts validations, and this fit has none"),
    ],
)
def test_what_cannot_grow_is_refused_before_a_step(growth, options, message):
    module = options.get("module", Net())
    before = deepcopy(module.state_dict())
    with pytest.raises(ValueError, match=message):
        fitted(BatchSizeGrowth(**growth), **options)
    assert_close(module.state_dict(), before, rtol=0, atol=0)


def own_backward():
    with pytest.raises(ValueError, match=r"OwnBackward.backward is overridden"):
        fitted(BatchSizeGrowth([1]), hybrid(1, microbatches=1), module=OwnBackward())
    trainer = trainer_of(hybrid(1, microbatches=1))
    trainer.fit(OwnBackward(), loader(SAMPLES, BATCH))
    return trainer.global_step


def test_one_process_that_will_accumulate_refuses_what_accumulation_cannot_have():
    assert run_trainers(1, own_backward) == [SAMPLES // BATCH]  # without growth it trains


def test_a_schedule_that_would_decay_twice_is_refused():
    with pytest.raises(ValueError, match="takes the place of MultiStepLR"):
        fitted(BatchSizeGrowth.from_lr_schedule([1], gamma=0.5), module=Scheduled())


def test_a_value_that_nobody_logs_is_named():
    with pytest.raises(ValueError, match=r"on_plateau='loss'.: no such value has been logged. There are .*val_loss"):
        fitted(BatchSizeGrowth(on_plateau="loss", max_batch=8), module=Validated())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give one of the two"),
        ({"milestones": [1], "on_plateau": "loss", "max_batch": 8}, "give one of the two"),
        ({"milestones": []}, "and not empty"),
        ({"milestones": "12"}, "must be a list of them"),
        ({"milestones": [0]}, "each milestone=0 must be a whole number of at least 1"),
        ({"milestones": [2, 2]}, "has one twice"),
        ({"milestones": [2], "factor": 1}, "factor=1 must be a finite number above 1"),
        ({"milestones": {2: 0.5}}, "factor of milestone 2=0.5 must be"),
        ({"milestones": [2], "max_batch": 0.5}, "max_batch=0.5 must be a whole number"),
        ({"on_plateau": "loss"}, "on_plateau needs max_batch"),
        ({"on_plateau": 3, "max_batch": 8}, "on_plateau=3 must be the name"),
        ({"milestones": [2], "unit": "words"}, "unit='words' must be 'samples' or 'tokens'"),
        ({"milestones": [2], "interval": "batch"}, "interval='batch' must be 'epoch' or 'step'"),
        ({"milestones": [2], "mode": "low"}, "mode='low' must be 'min' or 'max'"),
        ({"milestones": [2], "patience": 0}, "patience=0 must be a whole number of validations"),
        ({"milestones": [2], "min_delta": -1}, "min_delta=-1 must be a finite number of at least 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        BatchSizeGrowth(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({1: 0.5}, 0.5), "Leave gamma=0.5 and length=None out"),
        (([1],), "give milestones with gamma"),
        ((3, 0.5), "a step_size with gamma and length"),
        (([1], 1.5), "A batch grows only where a rate falls"),
        (([1], math.nan), "gamma=nan must be a finite number"),
        (({1: "half"},), "must have numbers, and has 'half' at 1"),
    ],
)
def test_wrong_schedules_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        BatchSizeGrowth.from_lr_schedule(*arguments)
