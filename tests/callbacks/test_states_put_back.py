"""States of callbacks go back in the middle of a fit: what is trained again, and after it, is the same to the bit."""

from copy import deepcopy

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging

from lightning_hybrid.callbacks import (
    ActivationCompression,
    ActivationOffload,
    ActivationRecompute,
    CommunicationLedger,
    DivergenceRollback,
    ExpertMonitor,
    GradientNoise,
    GradientNoiseScaleMonitor,
    LearningRateScaling,
    LearningRateWarmup,
    MemoryLedger,
    OptimizerRestart,
    ParameterOffload,
    UtilizationMonitor,
)
from lightning_hybrid.callbacks.feeds import Recorder, Replay
from lightning_hybrid.callbacks.run_snapshot import HostCopies, RunSnapshot
from lightning_hybrid.compat import around_advance, outer_hooks
from lightning_hybrid.optim import Lars
from lightning_hybrid.parallel.ledgers import fates
from lightning_hybrid.parallel.memory import passes
from tests.callbacks.test_divergence_rollback import Experts, Scheduled, Stateful, compared, data, run
from tests.launch import run_trainers
from tests.small import Small, hybrid, weights

FIRST, NUMBER = 4, 4


class Twice(Callback):
    """Trains on some batches of an epoch, goes back before them, and trains on them again."""

    goes_back = False

    def __init__(self):
        self.kept, self.times = [], 0

    def on_train_start(self, trainer, pl_module):
        self.stop = around_advance(trainer, lambda advance, fetcher: self.run(trainer, advance, fetcher))

    def teardown(self, trainer, pl_module, stage):
        self.stop()

    def run(self, trainer, advance, fetcher):
        number = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if number == FIRST:
            self.kept = []
            self.snapshot = RunSnapshot(trainer, trainer.lightning_module, HostCopies(), None)
        advance(Recorder(fetcher, lambda item: self.kept.append(deepcopy(item))))
        if number == FIRST + NUMBER - 1:
            self.snapshot.put_back()
            self.times += 1
            again = Replay(self.kept)
            for _ in range(NUMBER):
                advance(again)


class Cycles(Small):
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), 0.01)
        cosine = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 1, T_mult=2)
        return [optimizer], [{"scheduler": cosine, "interval": "step"}]


class Corrected(Small):
    """Its momentum buffers hold the rate, which changes in each step."""

    def configure_optimizers(self):
        optimizer = Lars(self.parameters(), 0.1, momentum=0.9)
        by_step = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": by_step, "interval": "step"}]


class Grows(Callback):
    """Accumulates two batches from the third step on."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.trainer = trainer
        if trainer.global_step == 6:
            trainer.accumulate_grad_batches = 2

    def state_dict(self):
        return {"accumulate": self.trainer.accumulate_grad_batches}

    def load_state_dict(self, state):
        self.trainer.accumulate_grad_batches = state["accumulate"]


def loss_is_high(trainer, pl_module):
    return trainer.global_step % 3 == 2


def stateful():
    """One of each, whose states go together."""
    return [
        LearningRateScaling(8, "sqrt"),
        LearningRateWarmup(samples=60, momentum=0.5),
        OptimizerRestart(every=5, rewarm=3),
        GradientNoise(eta=0.01),
        GradientNoiseScaleMonitor(),
    ]


CASES = {
    "momentum correction": (Corrected, 1, lambda: [LearningRateScaling(8), LearningRateWarmup(steps=5)]),
    "batch of another size": (Scheduled, 1, lambda: [Grows(), LearningRateScaling(8)]),
    "epochs": (Scheduled, 2, lambda: [LearningRateScaling(8), LearningRateWarmup(epochs=1.5)]),
    "cycles": (Cycles, 1, lambda: [OptimizerRestart()]),
    "keys": (Scheduled, 1, lambda: [OptimizerRestart(when=loss_is_high, keys=["exp_avg"])]),
    "average": (Stateful, 1, lambda: [EMAWeightAveraging(decay=0.9), EarlyStopping("loss")]),
    "all": (Stateful, 2, stateful),
}


def outcome(make, model, loader, twice, max_epochs=2, **options):
    """Weights, states of the callbacks, and how often the run went back."""
    callbacks, goes_back = make(), Twice()
    trainer = run(model, loader, *callbacks, *[goes_back] * twice, max_epochs=max_epochs, **options)
    return weights(trainer), [str(callback.state_dict()) for callback in callbacks], goes_back.times


class Logging(Stateful):
    def on_train_epoch_end(self):
        self.log("loss", float(self.trainer.global_step))


@pytest.mark.parametrize("name", CASES)
def test_one_process(name):
    model, accumulate, make = CASES[name]
    model = Logging if name == "average" else model
    options = {"accumulate_grad_batches": accumulate}
    expected, states, _ = outcome(make, model, data(), False, **options)
    found, of_found, times = outcome(make, model, data(), True, **options)
    assert times == 2
    assert of_found == states
    compared(found, expected)


def both(replicas, options):
    """On a rank: of a run that goes back and one that does not."""
    layout = {"use_distributed_sampler": False, "accumulate_grad_batches": 2, "max_epochs": 1}
    return [
        outcome(stateful, Scheduled, data(replicas=replicas), twice, strategy=hybrid(**options), **layout)
        for twice in (True, False)
    ]


def test_a_pipeline_of_two_with_two_replicas():
    for (found, of_found, times), (expected, states, _) in run_trainers(4, both, 2, {"pipeline": 2, "zero_stage": 0}):
        assert times == 1
        assert of_found == states
        compared(found, expected)


class Open(Callback):
    """Looks, as the first of all callbacks, at what is open between two batches."""

    def __init__(self):
        self.seen = set()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        records = getattr(trainer.strategy, "record_timeline", False)
        self.seen.add((outer_hooks() is None, len(passes.observers), len(fates.observers), records))


HOLDING = {
    "ledgers": lambda: [MemoryLedger(), CommunicationLedger(), UtilizationMonitor()],
    "memory": lambda: [
        ActivationRecompute(),
        ActivationOffload(min_bytes=0),
        ActivationCompression(min_bytes=0),
        MemoryLedger(),
    ],
    "one plan": lambda: [
        ActivationRecompute(budget_bytes=10**9),
        ActivationOffload(min_bytes=0),
        ActivationCompression(min_bytes=0),
    ],
    "streaming": lambda: [ParameterOffload(), ActivationCompression(min_bytes=0)],
}


def gone_back(names, strategy, folder):
    """On a rank, or in one process: of runs with bad batches and without, by what holds something open over a batch."""
    found = []
    for name in names:
        rollback = DivergenceRollback(audit=str(folder / "audit.csv"), snapshot_every=3)
        options = {"max_epochs": 2, "log_every_n_steps": 4}
        clean = run(Scheduled, data(without=[3, 4]), *HOLDING[name](), strategy=strategy(), **options)
        watch = Open()
        callbacks = [watch, *HOLDING[name](), rollback]
        trainer = run(Scheduled, data(poisoned=[3, 4]), *callbacks, strategy=strategy(), **options)
        found.append((weights(trainer), weights(clean), rollback.rollbacks, watch.seen))
    return found


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.filterwarnings("ignore:Activation.* nothing")
def test_nothing_stays_open_when_a_batch_is_left(size, tmp_path, capsys):
    """Batches 3 and 4 end in exceptions, and the first of them is one whose times are recorded."""
    outcomes = (
        [gone_back(list(HOLDING), lambda: "auto", tmp_path)]
        if size == 1
        else run_trainers(2, gone_back, ["ledgers", "one plan"], hybrid, tmp_path)
    )
    for outcome in outcomes:
        for found, expected, rollbacks, seen in outcome:
            assert rollbacks == 4
            assert seen == {(True, 0, 0, False)}
            compared(found, expected)


def routed(model, loader, callbacks):
    monitor = ExpertMonitor(every_n_steps=3, picture=False)
    run(model, loader, monitor, *callbacks, max_epochs=2)
    return list(monitor.history.windows), monitor.last


def test_counts_of_experts_go_back(tmp_path):
    rollback = DivergenceRollback(audit=str(tmp_path / "audit.csv"), snapshot_every=4)
    expected = routed(Experts, data(without=[7]), [])
    assert routed(Experts, data(poisoned=[7]), [rollback]) == expected
    assert len(expected[0]) == 8
    assert routed(Experts, data(without=[7]), [Twice()]) == expected


def test_a_step_that_comes_again_is_saved_again(tmp_path):
    """Batches 4 to 7 are left out when step 6 has been saved: what was saved there had seen two of them."""
    states = []
    for name, loader in (("clean", data(without=range(4, 8))), ("found", data(poisoned=[7]))):
        folder = tmp_path / name
        saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=2)
        rollback = DivergenceRollback(skip_batches=4, snapshot_every=2, keep=4, audit=str(tmp_path / "audit.csv"))
        run(Scheduled, loader, saving, rollback, enable_checkpointing=True)
        files = {path.name: torch.load(path, weights_only=False)["state_dict"] for path in folder.glob("*.ckpt")}
        states.append(files)
    clean, found = states
    assert rollback.rollbacks == 1
    assert "step=6.ckpt" in found
    compared(found, clean)


def test_statistics_over_batches_that_were_left_out_are_refused(tmp_path):
    """Without batch normalisation there are none, and the average of epochs is that of the clean run."""

    def averaged(model, loader, *callbacks):
        return weights(run(model, loader, StochasticWeightAveraging(0.01, 1), *callbacks, max_epochs=3))

    rollback = DivergenceRollback(audit=str(tmp_path / "audit.csv"))
    compared(averaged(Small, data(poisoned=[5]), rollback), averaged(Small, data(without=[5])))
    assert rollback.rollbacks == 3

    class Normed(Small):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(6, dtype=torch.float64)

    with pytest.raises(ValueError, match=r"batches that DivergenceRollback has left out\. Use WeightAveraging"):
        averaged(Normed, data(), rollback)
