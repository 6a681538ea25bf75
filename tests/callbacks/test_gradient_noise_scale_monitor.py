"""What a training is measured by: small gradients of unequal sizes and weights by hand, resumes, other callbacks."""

import math

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from lightning_hybrid import HybridPTDPStrategy
from lightning_hybrid.callbacks import GradientNoiseScaleMonitor
from lightning_hybrid.compat import TorchDispatchMode
from lightning_hybrid.functional.noise_scale import GradientSums, estimate
from lightning_hybrid.metrics import GradientNoiseScale
from lightning_hybrid.precision import FP16MasterWeights
from tests.launch import run_trainers
from tests.small import Small, fit, hybrid, loader, samples, trainer_of
from tests.test_windows import Windowed


class Net(Small):
    """Stays where it is; a frozen parameter and one that no step uses have no gradient."""

    depth, rate = 2, 0.0

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.blocks[1].linear.bias.requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.rate)


class Weighted(Net):
    def training_step(self, batch, batch_idx):
        loss, weight = weighed(self, batch)
        return {"loss": loss, "loss_weight": weight}


def weighed(module, batch):
    x, y = batch
    weights = x[:, :1].abs() + 0.1
    return ((module(x) - y).square() * weights).sum() / weights.sum(), float(weights.sum())


def by_hand(number, parts, *, weights=None):
    """Moments of one step: of its parts, each some of a number of samples; by returned weights where none are given."""
    module, rows, whole, total = Net(), [], 0.0, 0.0
    trained = [p for name, p in module.named_parameters() if p.requires_grad and name != "unused"]
    for index, part in enumerate(parts):
        batch = samples(number)[part]
        loss, size = (module.loss(batch), len(part)) if weights else weighed(module, batch)
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)])
        weight = weights[index] if weights else size
        rows.append((float(gradient.square().sum()), size, weight))
        whole, total = whole + weight * gradient, total + weight
    divisor = 1 if weights else total
    sums = GradientSums.of([(square, size, weight / divisor) for square, size, weight in rows])
    return estimate(sums, float((whole / divisor).square().sum()))


def monitor(decay=0.9):
    return GradientNoiseScaleMonitor(GradientNoiseScale(decay))


def run(module, train, strategy="auto", **options):
    """The monitor of a fit."""
    own = monitor()
    fit(module, train, strategy, **{"callbacks": [own], **options})
    return own


def averaged(*steps):
    """As `monitor` does."""
    weights = [0.9 ** (len(steps) - 1 - index) for index in range(len(steps))]
    sums = (sum(w * value for w, value in zip(weights, column, strict=True)) for column in zip(*steps, strict=True))
    return tuple(value / sum(weights) for value in sums)


def test_windows_that_end_early_weigh_batches_as_lightning_does():
    own = run(Net(), loader(17, 4), accumulate_grad_batches=3)  # batches of 4, 4, 4 and of 4, 1
    parts = [list(range(start, min(start + 4, 17))) for start in range(0, 17, 4)]
    first, second = by_hand(17, parts[:3], weights=[1 / 3] * 3), by_hand(17, parts[3:], weights=[1 / 3] * 2)
    assert own.metric.moments == pytest.approx(averaged(first, second), rel=1e-9)
    assert own.metric.steps == 2
    assert run(Net(), loader(12, 4), accumulate_grad_batches=2).metric.steps == 1  # the second has one gradient only


def uneven():
    """On one of four ranks: two steps of two replicas, each of micro-batches of 3 and 2 samples."""
    found = {}
    for zero in (1, 3):
        strategy = {"zero_stage": zero, "num_microbatches": 2, "pipeline_parallel_size": 2}
        for module in (Net, Weighted):
            own = run(module(), loader(20, 10, 2), HybridPTDPStrategy(**strategy))
            found[zero, module.__name__] = own.metric.moments
    return found


def test_micro_batches_count_by_samples_or_by_the_weights_that_steps_return():
    rounds = [[range(start + r, start + 10, 2) for r in range(2)] for start in (0, 10)]
    parts = [[list(part) for replica in replicas for part in (replica[:3], replica[3:])] for replicas in rounds]
    plain = averaged(*(by_hand(20, step, weights=[0.3, 0.2] * 2) for step in parts))
    weighted = averaged(*(by_hand(20, step) for step in parts))
    assert plain != pytest.approx(weighted, rel=0.01)
    for found in run_trainers(4, uneven):
        for (_, name), moments in found.items():
            assert moments == pytest.approx(plain if name == "Net" else weighted, rel=1e-9)


class Deep(Net):
    depth = 4


TENSOR = {"pipeline_parallel_size": 1, "tensor_parallel_size": 2}
LAYOUTS = {
    "chunks": (Deep, {"num_chunks": 2}),
    "tensor": (Windowed, TENSOR),
    "sequence": (Windowed, TENSOR | {"sequence_parallel": True}),
}


def by_layout():
    """On one of two ranks: moments of two steps of four micro-batches, or what is refused."""
    found = {}
    for name, (module, options) in LAYOUTS.items():
        try:
            own = run(module(), loader(16, 8), HybridPTDPStrategy(num_microbatches=4, **options))
            found[name] = own.metric.moments
        except ValueError as refused:
            found[name] = str(refused)
    return found


def test_chunks_and_slices_are_parts_of_one_gradient():
    alone = {"accumulate_grad_batches": 4}
    deep, windowed = (tuple(run(module(), loader(16, 2), **alone).metric.moments) for module in (Deep, Windowed))
    for found in run_trainers(2, by_layout):
        assert found["chunks"] == pytest.approx(deep, rel=1e-9)
        assert found["tensor"] == pytest.approx(windowed, rel=1e-9)
        assert "sequence_parallel=True" in found["sequence"]


class Save(Callback):
    """Saves a checkpoint after a batch."""

    def __init__(self, path, batch):
        self.path, self.batch = path, batch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == self.batch:
            trainer.save_checkpoint(self.path)


class Moving(Net):
    rate = 0.05


def resumed(folder):
    """On a rank: what is known at the end with and without an interruption within a window, in two layouts."""
    found, accumulate = [], {"accumulate_grad_batches": 2}
    layouts = [{"pipeline": 2}, {"pipeline": 1, "zero_stage": 3}]
    for options in layouts:
        own, again, path = monitor(), monitor(), folder / "saved.ckpt"
        data = 2 // options["pipeline"]
        fit(Moving(), loader(16, 4, data), hybrid(**options), callbacks=[own, Save(path, 2)], **accumulate)
        trainer = trainer_of(hybrid(**options), callbacks=[again], **accumulate)
        trainer.fit(Moving(), loader(16, 4, data), ckpt_path=path)
        found.append((own.metric.saved(), again.metric.saved()))
    return found


def test_resumes_within_a_window_are_as_uninterrupted(tmp_path):
    for found in run_trainers(2, resumed, tmp_path):
        for uninterrupted, again in found:
            assert again == uninterrupted
            assert uninterrupted["count"] == 2
    own, again, path, given = monitor(), monitor(), tmp_path / "one.ckpt", {"accumulate_grad_batches": 2}
    fit(Moving(), loader(16, 4), callbacks=[monitor()], **given).save_checkpoint(path)
    fit(Moving(), loader(16, 4), callbacks=[own], max_epochs=2, **given)
    trainer_of(callbacks=[again], max_epochs=2, **given).fit(Moving(), loader(16, 4), ckpt_path=path)
    assert again.metric.saved() == own.metric.saved()


class Reading(TorchDispatchMode):
    """Knows whether a tensor's value has been asked for, which waits for a device."""

    has_read = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.has_read |= func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class Watched(GradientNoiseScaleMonitor):
    def __init__(self):
        super().__init__()
        self.reads = []

    def on_after_backward(self, trainer, pl_module):
        with Reading() as mode:
            super().on_after_backward(trainer, pl_module)
        self.reads.append(mode.has_read)


def test_a_device_is_not_waited_for_within_a_window():
    fit(Net(), loader(16, 4), callbacks=[own := Watched()], accumulate_grad_batches=4)
    assert own.reads[:3] == [False] * 3
    assert own.metric.steps == 1


class Noise(Callback):
    """Changes gradients, as callbacks that add noise do."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            parameter.grad.add_(1.0)


def test_what_changes_gradients_later_does_not_show():
    given = {"accumulate_grad_batches": 2}
    plain = run(Net(), loader(16, 4), **given).metric.saved()
    own = monitor()
    fit(Net(), loader(16, 4), callbacks=[Noise(), own], gradient_clip_val=1e-3, **given)
    assert own.metric.saved() == plain


class Half(Net):
    def __init__(self):
        super().__init__()
        self.float()

    def loss(self, batch):
        return super().loss([tensor.float() for tensor in batch])


def scaled(scale, **more):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    return run(Half(), loader(16, 4), plugins=[plugin], accumulate_grad_batches=2, **more).metric


def masters(scale):
    strategy = {"pipeline_parallel_size": 1, "zero_stage": 2, "num_microbatches": 2}
    plugins = [FP16MasterWeights(init_scale=scale)]
    return run(Half(), loader(16, 8, 2), HybridPTDPStrategy(**strategy), plugins=plugins).metric


def masters_moments():
    """On a rank."""
    return [masters(scale).moments for scale in (1.0, 2.0**8)], masters(2.0**31).steps


def test_loss_scales_are_divided_out_and_overflows_do_not_count():
    exact = run(Net(), loader(16, 4), accumulate_grad_batches=2).metric.moments
    assert scaled(2.0**8).moments == pytest.approx(tuple(exact), rel=0.02)  # float16 has 11 bits
    assert scaled(2.0**8).moments == pytest.approx(scaled(1.0).moments, rel=1e-3)
    assert scaled(2.0**31).steps == 0
    (one, large), steps = run_trainers(2, masters_moments)[0]
    assert large == pytest.approx(one, rel=1e-3)
    assert steps == 0


class Logging(Net):
    def __init__(self):
        super().__init__()
        self.noise_scale = GradientNoiseScale(0.9)

    def configure_callbacks(self):
        return [GradientNoiseScaleMonitor(self.noise_scale, name="step_scale")]

    def on_train_epoch_end(self):
        self.kept = self.noise_scale.moments
        self.log("epoch_scale", self.noise_scale)


def logged():
    """On a rank."""
    trainer = fit(module := Logging(), loader(16, 4), hybrid(pipeline=2))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, module.kept


def test_modules_log_their_own_metric_and_the_monitor_logs_each_step():
    expected = run(Net(), loader(16, 2), accumulate_grad_batches=2).metric.moments
    for values, kept in run_trainers(2, logged):
        assert kept == pytest.approx(tuple(expected), rel=1e-9)
        scale = pytest.approx(kept.noise / kept.signal, rel=1e-6)
        assert values == {"epoch_scale": scale, "step_scale": scale}


def test_metric_says_when_nothing_is_known():
    metric = GradientNoiseScale()
    with pytest.warns(UserWarning, match="before the ``update``"):
        assert math.isnan(metric.compute())
    parts = GradientSums.of([(5.0, 1, 0.5), (5.0, 1, 0.5)])
    metric.update(parts, 1.0)
    assert math.isinf(metric.compute())
    metric.update(parts, 4.0)
    assert metric.compute() == metric.moments.noise / metric.moments.signal
