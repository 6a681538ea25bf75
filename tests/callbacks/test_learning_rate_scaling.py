"""Rates that follow the global batch: what it is in every layout and for every loader, and what the factor is."""

import math
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from lightning_hybrid.callbacks import LearningRateScaling, LearningRateWarmup
from lightning_hybrid.cli.main import main
from lightning_hybrid.optim import Lars
from tests.callbacks.rates import BATCH, BATCHES, Net, Rates, fitted
from tests.launch import run_trainers
from tests.small import WIDTH, fit, hybrid, samples, trainer_of


def scaled(data, accumulate=1, module=None, **options):
    """The global batch that a fit had, and what its steps' rates were multiplied by."""
    callback, seen = LearningRateScaling(**{"reference_batch_size": 2, **options}), Rates()
    trainer = trainer_of(callbacks=[callback, seen], accumulate_grad_batches=accumulate)
    trainer.fit(Constant() if module is None else module, data)
    return callback.global_batch, [rate / 0.5 for (rate,) in seen.effective]


class Constant(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.5)

    def loss(self, batch):
        return super().loss(batch) * 1e-6


@pytest.mark.parametrize(
    ("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0), (math.log2, 2.0), (lambda ratio: ratio**2, 16.0)]
)
def test_factor_is_the_rule_of_the_ratio(rule, factor):
    assert scaled(DataLoader(samples(16), 4), accumulate=2, rule=rule) == (8, [factor] * 2)


class Stream(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


class Plain:
    """A loader that only can be gone through."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


class Growing:
    """A batch sampler that does not say how large its batches are."""

    def __iter__(self):
        return iter(([0, 1, 2], [3, 4, 5, 6], [7]))

    def __len__(self):
        return 3


def whole(items):
    """A loader of items that are batches."""
    return DataLoader(Stream(items), batch_size=None)


def batches(*sizes):
    found = samples(sum(sizes)).tensors
    return list(zip(*(tensor.split(sizes) for tensor in found), strict=True))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: DataLoader(samples(10), 4), 4),
        (lambda: DataLoader(samples(3), 100), 3),
        (lambda: DataLoader(samples(6), batch_sampler=BatchSampler(SequentialSampler(range(6)), 4, False)), 4),
        (lambda: DataLoader(samples(8), batch_sampler=Growing()), 3),
        (lambda: DataLoader(Stream([samples(8)[i] for i in range(8)]), 4), 4),
        (lambda: whole(batches(3, 3, 1)), 3),
        (lambda: Plain(batches(5, 1)), 5),
    ],
)
def test_batch_is_what_the_loader_says_or_else_the_first(make, expected):
    batch, factors = scaled(make())
    assert batch == expected
    assert set(factors) == {expected / 2}


class Tokens(Constant):
    def loss(self, batch):
        return self(torch.ones(len(batch["mask"]), WIDTH, dtype=torch.float64)).sum() * 1e-6


def texts(*lengths, size=2):
    """Batches with a mask and a real number before the tokens."""
    return [
        {
            "mask": torch.ones(size, n, dtype=torch.bool),
            "weight": torch.rand(size),
            "ids": torch.arange(size * n).view(size, n),
        }
        for n in lengths
    ]


def test_tokens_are_those_of_the_first_batch():
    data = whole(texts(6, 9, 2))
    batch, factors = scaled(data, 2, Tokens(), unit="tokens", reference_batch_size=8)
    assert (batch, factors) == (24, [3.0, 3.0])


def test_factor_follows_an_accumulation_that_changes(caplog):
    callbacks = [LearningRateScaling(4), GradientAccumulationScheduler({0: 3, 1: 2})]
    effective, _ = fitted(Constant(), callbacks, max_epochs=2)
    assert effective == [[1.5]] * 2 + [[1.0]] * 3
    said = [record.message for record in caplog.records if "LearningRateScaling" in record.message]
    assert said == [
        "LearningRateScaling: global batch 12 samples = 4 x 3 accumulated x 1 replicas; learning rates x 3 (linear "
        "from 4)",
        "LearningRateScaling: global batch 8 samples (before: 12) = 4 x 2 accumulated x 1 replicas; learning rates x 2 "
        "(linear from 4)",
    ]


def test_resumed_run_follows_its_own_batch_and_says_so(tmp_path, caplog):
    fitted(Constant(), [LearningRateScaling(4)], save=tmp_path)
    rest, _ = fitted(Constant(), [LearningRateScaling(4)], batch=8, resume=tmp_path / "epoch=0.ckpt", max_epochs=2)
    assert rest == [[1.0]] * 3
    assert "global batch 8 samples (before: 4) = 8 x 1 accumulated" in caplog.text


def test_resumed_run_keeps_what_was_measured(tmp_path):
    """Its first batch has other tokens than the run's."""
    found = []
    for epochs, data, path in ((1, texts(6, 9), None), (2, texts(3, 9), tmp_path / "one.ckpt")):
        callback = LearningRateScaling(6, unit="tokens")
        trainer = trainer_of(callbacks=[callback], max_epochs=epochs)
        trainer.fit(Tokens(), whole(data), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / "one.ckpt")
        found.append((callback.global_batch, callback.factor))
    assert found == [(12, 2.0)] * 2


def test_resumed_run_with_another_unit_measures_anew(tmp_path):
    found = []
    for epochs, unit, path in ((1, "samples", None), (2, "tokens", tmp_path / "one.ckpt")):
        callback = LearningRateScaling(2, unit=unit)
        trainer = trainer_of(callbacks=[callback], max_epochs=epochs)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*callbacks used to create the checkpoint")
            trainer.fit(Tokens(), whole(texts(6)), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / "one.ckpt")
        found.append(callback.global_batch)
    assert found == [2, 12]


class Reloading(Constant):
    """Its batches are larger in each epoch."""

    def train_dataloader(self):
        return DataLoader(samples(12), 2 + 2 * self.current_epoch)


def test_factor_follows_loaders_that_change():
    callback, seen = LearningRateScaling(2), Rates()
    options = {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}
    trainer_of(callbacks=[callback, seen], **options).fit(Reloading())
    assert seen.effective == [[0.5]] * 6 + [[1.0]] * 3


def test_one_callback_measures_each_fit_anew():
    callback = LearningRateScaling(2)
    for size in (3, 5):
        fit(Constant(), whole(batches(size)), callbacks=[callback])
        assert callback.global_batch == size


class Ids(Constant):
    def loss(self, batch):
        return self(batch[0].double()[:, :1].expand(-1, WIDTH)).sum() * 1e-6


class Parallel(Constant):
    """Its ranks share a batch."""

    def configure_model(self):
        for block in self.blocks:
            plan = ColwiseParallel(output_layouts=Replicate())
            parallelize_module(block.linear, self.device_mesh["tensor_parallel"], plan)


def global_batches():
    """On a rank: what counts as the global batch; replicas' batches have 2 and 4 samples, one replica's has 4."""
    own, found = 2 + 2 * dist.get_rank(), []
    shared = DataLoader(samples(8), 4)
    for module, strategy, data, unit in (
        (Constant(), "ddp", DataLoader(samples(8), own), "samples"),
        (Constant(), "ddp", whole(batches(own)), "samples"),
        (Tokens(), "ddp", whole(texts(5, size=own)), "tokens"),
        (Constant(), hybrid(2, microbatches=2), shared, "samples"),
        (Ids(), hybrid(2, microbatches=2), DataLoader(TensorDataset(torch.arange(40).view(8, 5)), 4), "tokens"),
        (Parallel(), ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2), shared, "samples"),
    ):
        scaling, warmup = LearningRateScaling(2, unit=unit), LearningRateWarmup(samples=1000)
        options = {"use_distributed_sampler": False, "accumulate_grad_batches": 3, "limit_train_batches": 1}
        fit(module, data, strategy, callbacks=[scaling, warmup], **options)
        found.append((scaling.global_batch, warmup.state_dict()["samples"][0]["applied"]))
    return found


def test_global_batch_counts_replicas_with_what_each_has_and_no_other_ranks():
    for found in run_trainers(2, global_batches):
        batch = [6, 6, 6 * 5, 4, 4 * 5, 4]
        assert found == [(3 * units, samples) for units, samples in zip(batch, [6, 6, 6, 4, 4, 4], strict=True)]


class Pulled(Net):
    """Steps whose rates change, with or without the rate in the buffer."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def configure_optimizers(self):
        optimizer = self.make(self.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.25)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_momentum_is_corrected_where_the_rate_is_in_it_and_torchs_needs_no_correction():
    """arXiv:1706.02677, section 3.2: with it both forms of SGD are one, for changes by schedule, warm-up and batch."""

    def end(make, correction="auto"):
        scaling = LearningRateScaling(2, momentum_correction=correction)
        callbacks = [scaling, LearningRateWarmup(4, start_factor=0.5), GradientAccumulationScheduler({0: 1, 1: 2})]
        return fitted(Pulled(make), callbacks, max_epochs=2)[1]

    def inside(parameters):
        return Lars(parameters, 0.05, adapt=False)

    outside = end(lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9))
    torch.testing.assert_close(end(inside), outside, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(end(inside, correction=True), outside, rtol=1e-11, atol=1e-13)
    wrong = end(inside, correction=False)
    assert not torch.allclose(wrong["inlet.weight"], outside["inlet.weight"], rtol=1e-4)


def test_factor_of_one_is_the_run_without_the_callback():
    _, plain = fitted(Net("AdamW"), [])
    _, found = fitted(Net("AdamW"), [LearningRateScaling(BATCH, "sqrt")])
    assert all(torch.equal(value, found[name]) for name, value in plain.items())


@pytest.mark.parametrize(
    ("module", "data", "options", "error", "message"),
    [
        (
            Constant(),
            {"a": whole(batches(2)), "b": whole(batches(2))},
            {},
            ValueError,
            "has batches of 2 loaders, of which Learning",
        ),
        (
            Constant(),
            whole(batches(2)),
            {"unit": "tokens"},
            ValueError,
            "no tensor of whole numbers whose elements could be",
        ),
        (
            Constant(),
            whole(batches(2)),
            {"rule": lambda r: -r},
            ValueError,
            "gives the factor -1.0 for a global batch of 2 a",
        ),
        (Constant(), whole([object()]), {}, TypeError, "The batch holds object and no tensor, so that its samples"),
        (
            Constant(),
            whole(batches(2)),
            {"momentum_correction": True},
            ValueError,
            "holds the learning rate, and SGD has none",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_a_step(module, data, options, error, message):
    before = [parameter.clone() for parameter in module.parameters()]
    with pytest.raises(error, match=message):
        scaled(data, module=module, **options)
    assert all(torch.equal(mine, its) for mine, its in zip(module.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reference_batch_size": 0}, "reference_batch_size=0 must be a whole number of at least 1"),
        ({"reference_batch_size": 2.5}, "reference_batch_size=2.5 must be a whole number"),
        ({"rule": "cubic"}, "rule='cubic' must be 'linear', 'sqrt' or a function"),
        ({"rule": ["linear"]}, r"rule=\['linear'\] must be 'linear', 'sqrt' or a function"),
        ({"unit": "words"}, "unit='words' must be 'samples' or 'tokens'"),
        ({"momentum_correction": "yes"}, "momentum_correction='yes' must be 'auto', True or False"),
        ({"log": 1}, "log=1 must be True or False"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LearningRateScaling(**{"reference_batch_size": 256, **arguments})


class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(samples(BATCHES * BATCH), BATCH)


CONFIG = """
seed_everything: 0
model: tests.callbacks.rates.Net
data: tests.callbacks.test_learning_rate_scaling.Data
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 1
  default_root_dir: {folder}
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - {{class_path: LearningRateScaling, init_args: {{reference_batch_size: 1, rule: {rule}, unit: samples}}}}
    - {{class_path: LearningRateWarmup, init_args: {{epochs: 0.5, start_factor: 0.1, momentum: 0.5}}}}
    - tests.callbacks.rates.Rates
"""


@pytest.mark.parametrize(("rule", "factor"), [("sqrt", 2.0), ("math.log1p", math.log1p(4))])
def test_configurations_have_both_by_short_names_and_functions_by_path(rule, factor, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(sys, "argv", ["lightning-hybrid"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of what LightningCLI calls
    path = tmp_path / "given.yaml"
    path.write_text(CONFIG.format(rule=rule, folder=tmp_path))
    main(["fit", "--config", str(path)])
    assert f"learning rates x {factor:g} ({rule.rpartition('.')[2]} from 1)" in caplog.text
