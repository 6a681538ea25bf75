"""Profiles of micro-batches by size: exact times with a clock of the test's, and training that does not notice them."""

import random
from dataclasses import dataclass
from types import SimpleNamespace

import numpy
import pytest
import torch
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torchmetrics import MeanMetric

from lightning_hybrid.callbacks import BatchTimeProfile
from lightning_hybrid.callbacks.step_alone import refuse_parts
from lightning_hybrid.experts import MoELayer
from lightning_hybrid.functional.batch_times import BatchTimes
from lightning_hybrid.parallel.pipeline.microbatch import take_samples
from tests.launch import run_trainers
from tests.small import WIDTH, Small, fit, hybrid, loader, trainer_of, weights

TICK, OVERHEAD, SLOPE = 0.25, 7.75, 0.5  # seconds: of a look at the clock, of a step, and of a sample in it


class Clock:
    """Moves where it is read, and where a step says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += TICK
        return self.now


class Kept(Logger):
    name = version = "kept"

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append({key: value for key, value in metrics.items() if "batch_time" not in key})

    def log_hyperparams(self, *args, **kwargs):
        pass


@dataclass
class Count:
    calls: int = 0


class Stateful(Small):
    """Has whatever a step can leave behind, and writes to its batch."""

    def __init__(self, clock, most=1000):
        super().__init__()
        self.clock, self.most, self.calls, self.losses = clock, most, 0, []
        self.own = [torch.Generator().manual_seed(1), numpy.random.default_rng(1), random.Random(1)]
        self.old, self.array, self.count = numpy.random.RandomState(1), numpy.zeros(2), Count()
        self.teacher = nn.Linear(WIDTH, 1).double().requires_grad_(False)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH).double(), nn.Dropout(0.3)
        self.mean = MeanMetric().set_dtype(torch.float64)

    def training_step(self, batch, batch_idx):
        x, y = batch
        x.add_(0.5)
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.clock.now += OVERHEAD + SLOPE * len(x) * (1 + self.global_rank)
        loss = (self(self.drop(self.norm(x))) - y).square().mean()
        loss = loss + self.elsewhere(x)
        self.calls += 1
        self.losses.append(loss.item())
        self.mean.update(loss)
        self.log("loss", loss)
        self.log(f"of {len(x)}", loss)
        if self.logger is not None:
            self.logger.log_metrics({"direct": loss.item()})
        return {"loss": loss}

    def elsewhere(self, x):
        """A number that depends on what is neither a buffer nor a plain number, each moved at each call."""
        for own, other in zip(self.teacher.parameters(), self.outlet.parameters(), strict=True):
            own.data.lerp_(other.data, 0.1)
        torch_own, numpy_own, python_own = self.own
        self.array += 1
        self.count.calls += 1
        drawn = torch.rand((), generator=torch_own).item() + numpy_own.random() + python_own.random()
        drawn += self.old.rand() + self.array.sum() + self.count.calls
        return drawn * (self.teacher(x) * self(x)).mean()


def outcome(strategy="auto", data=1, profile=None, **options):
    """All that a fit leaves: weights and buffers, gradients, what was logged, random numbers."""
    torch.manual_seed(5)
    module, kept = Stateful(Clock()), Kept()
    callbacks = [] if profile is None else [profile]
    trainer = fit(
        module, loader(12, 6, data), strategy, callbacks=callbacks, logger=kept, log_every_n_steps=1, **options
    )
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    logged = {name: value for name, value in trainer.callback_metrics.items() if "batch_time" not in name}
    left = (dict(weights(trainer)), gradients, torch.rand(3), kept.rows, logged, module.calls, module.losses)
    return left, trainer


def profile_of(**options):
    return BatchTimeProfile(clock=Clock(), **options)


class Owned(BatchTimeProfile):
    """Reads the clock that the module moves."""

    def on_fit_start(self, trainer, pl_module):
        self.clock = pl_module.clock
        super().on_fit_start(trainer, pl_module)


def step_seconds(size, ranks=1):
    return TICK + OVERHEAD + SLOPE * size * ranks


@pytest.mark.parametrize(
    ("options", "sizes"), [({}, [2, 4, 6]), ({"max_size": 9}, [2, 4, 8, 9]), ({"sizes": [3, 7]}, [3, 7])]
)
def test_times_are_the_clocks_and_training_does_not_notice(options, sizes, capsys, tmp_path):
    profile = Owned(repeats=2, picture=tmp_path, **options)
    found, trainer = outcome(profile=profile)
    expected, _ = outcome()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert profile.times.sizes == sizes
    assert profile.times.seconds == [step_seconds(size) for size in sizes]
    assert profile.knee is None
    assert "batch_time/knee" not in trainer.callback_metrics
    assert trainer.callback_metrics["batch_time/overhead_seconds"] == pytest.approx(TICK + OVERHEAD)
    assert trainer.callback_metrics["batch_time/seconds_per_sample"] == pytest.approx(SLOPE)
    assert "batch_time/exchange_ratio" not in trainer.callback_metrics
    printed = " ".join(capsys.readouterr().out.split())
    assert "t(b) is about 8e+03 ms + 500 ms b." in printed
    reached = sizes[-1] / (8 + SLOPE * sizes[-1]) * SLOPE
    larger = "larger sizes" if "sizes" in options else "a larger max_size"
    assert f"{sizes[-1]} samples have {reached:.0%} of the throughput that the line promises for endless" in printed
    assert f"give {larger} to see the knee." in printed
    assert (tmp_path / "batch_times.png").read_bytes().startswith(b"\x89PNG")


def test_knee_is_said_where_larger_sizes_pay_no_more(capsys):
    profile = Owned(repeats=1, max_size=512)
    _, trainer = outcome(profile=profile)
    best = 512 / step_seconds(512)
    first = next(b for b in range(1, 513) if b / step_seconds(b) >= 0.9 * best)
    assert profile.times.knee == profile.knee == trainer.callback_metrics["batch_time/knee"] == first
    assert f"From {first} samples on, a larger micro-batch pays less than 10%." in " ".join(
        capsys.readouterr().out.split()
    )


def test_times_that_do_not_grow_say_so():
    profile = BatchTimeProfile()
    profile.times = BatchTimes([1, 2, 4], [3.0, 2.0, 1.0])
    assert (
        "Times do not grow with the size: give a larger max_size, or more repeats, to see where they do."
        in profile.verdict()
    )
    assert profile.knee is None


class Mixture(Small):
    def __init__(self):
        super().__init__()
        self.outlet = nn.Sequential(MoELayer(WIDTH, 4, 2, router="loss_free"), self.outlet).double()


def test_experts_are_not_counted():
    module = Mixture()
    fit(module, loader(12, 6), callbacks=[BatchTimeProfile(repeats=1)])
    assert (module.outlet[0].statistics.num_passes, module.outlet[0].statistics.num_tokens) == (2, 12)
    expected = fit(Mixture(), loader(12, 6))
    torch.testing.assert_close(module.state_dict(), dict(weights(expected)), rtol=0, atol=0)


def test_profile_ends_where_the_memory_does(capsys):
    profile, module = Owned(repeats=1, max_size=100), Stateful(Clock(), most=6)
    fit(module, loader(12, 6), callbacks=[profile])
    assert (profile.times.sizes, profile.too_large) == ([2, 4], 8)
    assert "A micro-batch of 8 needs too much memory." in " ".join(capsys.readouterr().out.split())


REFUSED = {  # pipeline ranks, stage of ZeRO and precision on two ranks -> what is said
    (2, 0, "32-true"): r"2 ranks that share the model \(pipeline or tensor_parallel_size above 1\)",
    (1, 1, "32-true"): "zero_stage=1",
    (1, 0, "16-true"): "precision='16-true'",
}


def by_rank():
    """On a rank: fits with and without a profile, what was measured, and what is refused."""
    found, measured = [], []
    for strategy, options in (
        ("ddp", {}),
        (lambda: hybrid(1, microbatches=1, zero_stage=0), {"use_distributed_sampler": False}),
    ):
        for profile in (Owned(repeats=2), None):
            left, trainer = outcome(strategy if strategy == "ddp" else strategy(), 2, profile, **options)
            found.append(left)
            if profile is not None:
                logged = float(trainer.callback_metrics["batch_time/exchange_ratio"])
                measured.append((profile.times.sizes, profile.times.seconds, profile.exchange, profile.ratio, logged))
    for (pipeline, zero, precision), reason in REFUSED.items():
        module = Small().float() if precision == "16-true" else Small()
        trainer = trainer_of(hybrid(pipeline, zero_stage=zero), callbacks=[profile_of()], precision=precision)
        with pytest.raises(
            ValueError, match=rf"cannot run a step .* under HybridPTDPStrategy with {reason}. Use .* \"ddp\""
        ):
            trainer.fit(module, loader(12, 6, 2 // pipeline))
        assert trainer.global_step == 0
    return found, measured


@pytest.mark.filterwarnings("ignore:norm normalises by the statistics of each micro-batch")
def test_every_rank_measures_the_slowest_and_trains_as_without():
    results = run_trainers(2, by_rank)
    for found, _ in results:
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
        torch.testing.assert_close(found[2], found[3], rtol=0, atol=0)
    assert results[0][1] == results[1][1]
    seconds = [step_seconds(size, 2) for size in (2, 3)]
    ratio = pytest.approx(TICK / seconds[-1])
    assert results[0][1] == [([2, 3], seconds, TICK, ratio, ratio)] * 2


class ByHand(Small):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Fetching(Small):
    def training_step(self, dataloader_iter):
        pass


class Graphs(Small):
    def split_batch(self, batch, num_microbatches):
        return [batch]


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")  # which is refused
@pytest.mark.parametrize(
    ("module", "strategy", "message"),
    [
        (ByHand, "auto", "ByHand would step its optimizers in it"),
        (Fetching, "auto", "Fetching.training_step fetches its own"),
        (Graphs, "auto", "Graphs has split_batch"),
    ],
)
def test_steps_that_cannot_run_by_themselves_are_refused_before_training(module, strategy, message):
    trainer = trainer_of(strategy, callbacks=[profile_of()])
    with pytest.raises(ValueError, match=message):
        trainer.fit(module(), loader(12, 6))
    assert trainer.global_step == 0


def test_other_forms_of_the_model_are_refused_by_name():
    trainer = SimpleNamespace(strategy=FSDPStrategy())
    with pytest.raises(
        ValueError, match=r'BatchTimeProfile cannot run a step by itself under FSDPStrategy. Use .* "ddp"'
    ):
        refuse_parts(trainer, Small(), "BatchTimeProfile")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sizes": [4, 2]}, "must ascend"),
        ({"sizes": [1.5]}, "in sizes=1.5 must be a whole number"),
        ({"sizes": 64}, r"sizes=64 must be a list of numbers of samples, such as \[8, 16, 32\]"),
        ({"sizes": []}, r"sizes=\[\] must be a list"),
        ({"sizes": [1, 1]}, r"sizes=\[1, 1\] must ascend\.$"),
        ({"picture": None}, "picture=None must be True, False, or a path"),
        ({"picture": "times.JPG"}, r"picture='times.JPG' must end in \"\.png\", which pictures are, or be a folder"),
        ({"sizes": [1], "max_size": 4}, "give one of them"),
        ({"max_size": 0}, "max_size=0 must be a whole number of samples of at least 1"),
        ({"repeats": 0}, "repeats=0 must be"),
        ({"tolerance": 0.0}, "tolerance=0.0 must be above 0"),
    ],
)
def test_arguments_out_of_range_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        BatchTimeProfile(**given)


def test_samples_are_the_first_ones_and_repeated():
    x, batch = torch.arange(6).view(3, 2), {"names": ["a", "b", "c"], "scale": 2.0, "temperature": torch.tensor(3.0)}
    taken = take_samples({"x": x, **batch}, 5)
    assert taken["x"].tolist() == x[[0, 1, 2, 0, 1]].tolist()
    assert (taken["names"], taken["scale"], taken["temperature"]) == (["a", "b", "c", "a", "b"], 2.0, 3.0)
    whole = take_samples([x, x], 3)
    assert whole[0].data_ptr() not in (x.data_ptr(), whole[1].data_ptr())
    with pytest.raises(ValueError, match="another has shape"):
        take_samples([x, x[:2]], 2)
