"""Throughput and use of devices: counts and times are exact under every layout, with a clock that the test moves."""

import numpy
import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import DataLoader

from lightning_hybrid.callbacks import UtilizationMonitor
from lightning_hybrid.functional.utilization import model_flops_utilization, training_flops
from lightning_hybrid.metrics import ModelFlopsUtilization, Throughput
from tests.launch import run_trainers
from tests.small import WIDTH, Small, fit, hybrid, loader, samples, trainer_of

PEAK = 1e6
PER_SAMPLE = 3 * 2 * (7 * WIDTH**2 + WIDTH)  # of an inlet, six blocks and an outlet


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def __deepcopy__(self, memo):
        return self


class Hours(Callback):
    """Moves the clock: half a second a batch, a little more each time, and a lot for validation."""

    def __init__(self, clock):
        self.clock, self.batches = clock, 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches += 1
        self.clock.now += 0.5 + self.batches / 64

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.clock.now += 1000


class Seen(Callback):
    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        names = ("samples_per_second", "tokens_per_second", "batches_per_second", "model_flops_utilization")
        found = {name: trainer.callback_metrics.get(f"utilization/{name}") for name in names}
        self.values.append({name: float(value) for name, value in found.items() if value is not None})


class Measured(Small):
    """Logs throughput by epochs, as a module does."""

    def __init__(self, clock, devices):
        super().__init__()
        self.rate = 0.02
        self.throughput = Throughput(clock)
        self.utilization = ModelFlopsUtilization(PER_SAMPLE, PEAK, num_devices=devices, clock=clock)
        self.example_input_array = torch.zeros(5, WIDTH, dtype=torch.float64)

    def on_train_epoch_start(self):
        self.throughput.start()
        self.utilization.start()

    on_validation_end = on_train_epoch_start

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for name in ("throughput", "utilization"):
            getattr(self, name).update(len(batch[0]))
            self.log(name, getattr(self, name), on_step=False, on_epoch=True)


def tokens(batch):
    return batch[0].numel()


def measured(strategy="auto", data=1, devices=1, **options):
    """What the monitor logs batch by batch, and the metrics by the end of the last epoch."""
    clock, seen = Clock(), Seen()
    monitor = UtilizationMonitor("measured", peak_flops=PEAK, count_tokens=tokens, clock=clock)
    options = {"max_epochs": 2, "log_every_n_steps": 2, "val_check_interval": 3, "num_sanity_val_steps": 1, **options}
    callbacks = [Hours(clock), monitor, seen]
    train, val = (DataLoader(samples(number), size // data) for number, size in ((18, 4), (4, 4)))
    trainer = fit(Measured(clock, devices), train, strategy, val, callbacks=callbacks, **options)
    own = {name: float(trainer.callback_metrics[name]) for name in ("throughput", "utilization")}
    return seen.values, own, monitor.last.get("pipeline_bubble")


def by_rank():
    """On one of four ranks."""
    pipeline = measured(hybrid(), 2, 4)
    tensor = measured(hybrid(1, tensor_parallel_size=2, tensor_parallel_plan={"*.linear": "rowwise"}), 2, 4)
    return [pipeline, tensor, measured("ddp", 4, 4)]


@pytest.mark.parametrize(
    ("accumulate", "windows"),  # of batches; the first batch does not count
    [(1, [(1, 2), (2, 4), (4, 6), (6, 8), (8, 10)]), (2, [(1, 4), (4, 7), (7, 10)])],
)
def test_one_process_counts_as_by_hand(accumulate, windows):
    """18 samples in batches of 4, 4, 4, 4, 2 in each of two epochs, logged after every second step."""
    sizes, times = [4, 4, 4, 4, 2] * 2, [0.5 + number / 64 for number in range(1, 11)]
    *rates, of_epoch = (sum(sizes[begin:end]) / sum(times[begin:end]) for begin, end in [*windows, (5, 10)])
    rows, own, bubble = measured(accumulate_grad_batches=accumulate)
    assert rows[: windows[0][1] - 1] == [{}] * (windows[0][1] - 1)
    ends = [*(end for _, end in windows[1:]), 11]
    for (begin, end), following, rate in zip(windows, ends, rates, strict=True):
        assert rows[end - 1 : following - 1] == [rows[end - 1]] * (following - end)  # nothing is logged in between
        assert rows[end - 1] == {
            "samples_per_second": pytest.approx(rate, rel=1e-12),
            "tokens_per_second": pytest.approx(WIDTH * rate, rel=1e-12),
            "batches_per_second": pytest.approx((end - begin) / sum(times[begin:end]), rel=1e-12),
            "model_flops_utilization": pytest.approx(PER_SAMPLE * rate / PEAK, rel=1e-12),
        }
    assert own == {
        "throughput": pytest.approx(of_epoch, rel=1e-12),
        "utilization": pytest.approx(PER_SAMPLE * of_epoch / PEAK, rel=1e-12),
    }
    assert bubble is None


def test_every_layout_counts_each_sample_once():
    results = run_trainers(4, by_rank, timeout=200)
    assert all(of_rank == results[0] for of_rank in results)
    pipeline, tensor, ddp = results[0]
    for rows, own, _ in (pipeline, tensor):
        alone, own_alone, _ = measured()
        check(rows, alone)
        assert own == {name: pytest.approx(v / (4 if name == "utilization" else 1)) for name, v in own_alone.items()}
    assert 0 < pipeline[2] < 1
    assert tensor[2] == 0
    assert ddp[2] is None
    # shares of 18 samples over four ranks are padded to five each, in batches of one
    assert ddp[0][1]["samples_per_second"] == 4 / (0.5 + 2 / 64)


def check(rows, alone):
    """As one process, on four devices."""
    for row, reference in zip(rows, alone, strict=True):
        shared = {n: v / (4 if n == "model_flops_utilization" else 1) for n, v in reference.items()}
        assert row == {name: pytest.approx(value, rel=1e-12) for name, value in shared.items()}


def test_utilization_is_palms():
    assert model_flops_utilization(6e9, count=50, seconds=3.0, num_devices=4, peak_flops=1e12) == 6e9 * 50 / 3 / 4e12
    metric = ModelFlopsUtilization(1, peak_flops=1)
    metric.update(3)  # nobody knows when it began
    assert metric.compute().isnan()


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric ModelFlopsUtilization was called before")
def test_a_share_above_1_is_told_with_the_numbers_that_make_it():
    told = r"more FLOPs than its devices can: 3e\+04 for one sample or token, with peak_flops=989\. Give the peak"
    clock = Clock()
    metric = ModelFlopsUtilization(3e4, peak_flops=989, clock=clock)
    metric.start()
    clock.now += 1
    metric.update(1)
    with pytest.warns(UserWarning, match=told):
        assert metric.compute() == 3e4 / 989
    monitor = UtilizationMonitor(flops_per_sample=3e4, peak_flops=989, clock=clock)
    with pytest.warns(UserWarning, match=told):
        fit(Small(), loader(12, 4), callbacks=[monitor, Hours(clock)], log_every_n_steps=1)
    assert monitor.last["model_flops_utilization"] > 1


def test_flops_are_six_for_each_weight_and_token():
    linear, attention = nn.Linear(6, 8, dtype=torch.float64), nn.MultiheadAttention(8, 2, batch_first=True)
    attention.register_buffer("kept", torch.ones(3))
    state = torch.get_rng_state()
    assert training_flops(linear, [torch.zeros(5, 3, 6)]) == 6 * (6 * 8) * 5 * 3
    inputs = {name: torch.zeros(2, 5, 8) for name in ("query", "key", "value")}
    assert training_flops(attention, kwargs=inputs) == 6 * 2 * 5 * (4 * 8 * 8) + 3 * 2 * 2 * (2 * 5 * 5 * 8)
    assert training_flops(nn.Dropout(), [torch.zeros(4)]) == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert linear.weight.device.type == attention.kept.device.type == "cpu"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"flops_per_sample": 0}, "flops_per_sample=0 must be a number above 0"),
        ({"flops_per_sample": "guessed"}, "flops_per_sample='guessed' must be a number above 0"),
        ({"flops_per_sample": 1.0, "flops_per_token": 1.0}, "give one of them"),
        ({"flops_per_token": 1.0}, "needs count_tokens"),
        ({"peak_flops": float("nan")}, "peak_flops=nan must be a number above 0"),
        ({"count_tokens": True}, "count_tokens=True must be a function of a batch"),
        ({"count_samples": 4}, "count_samples=4 must be a function of a batch"),
        ({"bubble": "none"}, "bubble='none' must be 'share'"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        UtilizationMonitor(**given)


class Late(Small):
    def __init__(self):
        super().__init__()
        self.example_input_array = torch.zeros(1, WIDTH)

    def configure_model(self):
        pass


class Peeking(Small):
    example_input_array = torch.zeros(2, WIDTH, dtype=torch.float64)

    def forward(self, x):
        return super().forward(x) if x.sum().item() else x


@pytest.mark.parametrize(
    ("module", "monitor", "message"),
    [
        (Small, {"flops_per_sample": 1.0}, "no peak of cpu for precision='32-true'. Give"),
        (Small, {"flops_per_sample": "measured", "peak_flops": 1.0}, "Small has no example_input_array. Set it"),
        (Late, {"flops_per_sample": "measured", "peak_flops": 1.0}, "made in configure_model, later. Give"),
        (
            Peeking,
            {"flops_per_sample": "measured", "peak_flops": 1.0},
            "forward fails on meta tensors: .* Give",
        ),
    ],
)
def test_what_cannot_be_known_is_refused_before_training(module, monitor, message):
    trainer = trainer_of(callbacks=[UtilizationMonitor(**monitor)])
    with pytest.raises(ValueError, match=message):
        trainer.fit(module(), loader(8, 4))
    assert not trainer.optimizers


class Drawing(Small):
    """Its forward counts and draws."""

    depth, example_input_array = 2, torch.zeros(2, WIDTH, dtype=torch.float64)

    def __init__(self):
        super().__init__()
        self.calls, self.own = 0, numpy.random.default_rng(0)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.total = self.total + 1
        return super().forward(x) * (numpy.random.rand() + self.own.random() + self.calls)


def test_training_does_not_notice_that_flops_are_measured():
    found = []
    for callbacks in ([], [UtilizationMonitor("measured", peak_flops=1.0)]):
        numpy.random.seed(0)
        module = Drawing()
        fit(module, loader(8, 4), callbacks=callbacks)
        found.append((module.state_dict(), module.calls, numpy.random.rand()))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


class Blind(Small):
    def training_step(self, batch, batch_idx):
        return self.loss(samples(4).tensors)


def test_batches_that_cannot_be_counted_are_refused_before_the_first_step():
    trainer = trainer_of(callbacks=[UtilizationMonitor()])
    with pytest.raises(TypeError, match="The batch holds object and no tensor, so that its samples cannot be counted"):
        trainer.fit(Blind(), DataLoader([object()] * 2, collate_fn=lambda rows: rows[0]))
    assert trainer.global_step == 0


def test_metrics_refuse_what_they_cannot_say(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(ValueError, match="peak_flops=None: nobody knows the peak of a CPU"):
        ModelFlopsUtilization(1.0)
    with pytest.raises(ValueError, match="flops=-1 must be above 0"):
        ModelFlopsUtilization(-1, 1.0)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with pytest.raises(ValueError, match=r"table has no peak of cpu for torch.bfloat16. Give it"):
        ModelFlopsUtilization(1.0).start()
    with pytest.raises(RuntimeError, match=r"Throughput has no value of a single step. Call update\(...\)"):
        Throughput()(3)
