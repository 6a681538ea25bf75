"""The bubble as a metric: of simulated steps, and of real ones under a Trainer, the same on every rank."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback

from lightning_hybrid.functional.bubbles import pipeline_times
from lightning_hybrid.functional.lowering import lower
from lightning_hybrid.functional.schedules import choose
from lightning_hybrid.functional.simulation import simulate
from lightning_hybrid.metrics import PipelineBubble
from lightning_hybrid.parallel.pipeline.executor import Executor
from tests.launch import run_trainers
from tests.small import Small, fit, hybrid, loader


def events(p, m):
    return simulate(lower(choose("1f1b", p, m, 1), p)).events


@pytest.mark.parametrize(("convention", "expected"), [("share", 2 * 1 / (5 + 9)), ("ratio", 2 * 1 / (4 + 8))])
def test_steps_count_by_their_time(convention, expected):
    bubble = PipelineBubble(convention)
    assert bubble(events(2, 4)) == pytest.approx(1 / 5 if convention == "share" else 1 / 4)
    assert bubble(events(2, 8)) == pytest.approx(1 / 9 if convention == "share" else 1 / 8)
    assert bubble.compute() == pytest.approx(expected)
    bubble.reset()
    bubble.update(events(1, 4))
    assert bubble.compute() == 0


def test_another_convention_is_refused():
    with pytest.raises(ValueError, match=r"convention='idle' must be 'share' \(of total time\) or 'ratio'"):
        PipelineBubble("idle")


class Watched(Small):
    """Logs its bubble as a module does."""

    def __init__(self):
        super().__init__()
        self.bubble = PipelineBubble()

    def on_train_start(self):
        self.trainer.strategy.record_timeline = True

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.bubble.update(self.trainer.strategy)
        self.log("bubble", self.bubble, on_epoch=True, on_step=False)


class Timelines(Callback):
    def __init__(self):
        self.times = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.times.append(pipeline_times(trainer.strategy.timeline()))


class Unrecorded(Watched):
    def on_train_start(self):
        pass


def logged():
    """On a rank: what a pipeline has logged, and times of its steps; what goes without one; what is refused."""
    timelines = Timelines()
    value = fit(Watched(), loader(12, 4), hybrid(), callbacks=[timelines]).callback_metrics["bubble"].item()
    without = fit(Watched(), loader(12, 4, 2), "ddp").callback_metrics["bubble"].item()
    with pytest.raises(RuntimeError, match=r"HybridPTDPStrategy has not recorded the step: set .*record_timeline"):
        fit(Unrecorded(), loader(12, 4), hybrid())
    return value, without, timelines.times


def test_every_rank_logs_the_bubble_of_the_real_times():
    (value, without, times), *others = run_trainers(2, logged)
    assert [(value, without, times)] == others
    busy, total = (sum(column) for column in zip(*times, strict=True))
    assert len(times) == 3
    assert value == pytest.approx((total - busy) / total, rel=1e-12)
    assert 0 < value < 1
    assert without == fit(Watched(), loader(12, 4)).callback_metrics["bubble"].item() == 0


def test_a_device_is_waited_for_where_times_are_recorded(monkeypatch):
    waits = []
    stream = SimpleNamespace(synchronize=lambda: waits.append(1))
    monkeypatch.setattr(torch, "get_device_module", lambda d: SimpleNamespace(current_stream=lambda d: stream))
    mesh = SimpleNamespace(device=torch.device("cuda", 0), pipeline_rank=0)
    for record in (False, True):
        waits.clear()
        executor = Executor.__new__(Executor)
        executor.mesh, executor.record = mesh, record
        assert executor._now() > 0
        assert bool(waits) is record
