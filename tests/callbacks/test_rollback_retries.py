"""What a run does about a collapse: whom it names, how often it tries, what it changes, and how it is resumed."""

import csv

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch.utils.data import DataLoader, Subset

from lightning_hybrid.callbacks import DivergenceRollback
from tests.callbacks.test_divergence_rollback import SIZE, Made, Poisoned, Scheduled, compared, data, run
from tests.launch import run_trainers
from tests.small import Block, Small, hybrid, trainer_of, weights

MARK = 50.0


class Breaking(Block):
    """The fourth of the blocks gives NaN for a sample that has a mark."""

    def forward(self, x):
        x = super().forward(x)
        return torch.where(self.breaks & (x.abs() > MARK / 2).any(-1, keepdim=True), torch.nan, x)


class Marked(Small):
    block = Breaking

    def __init__(self):
        super().__init__()
        for number, block in enumerate(self.blocks):
            block.register_buffer("breaks", torch.tensor(number == 3))

    def forward(self, x):
        x = self.inlet(x.clamp(-5, 5)) + torch.where(x > MARK, x, 0.0)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


def marked(sample, replicas=1, rank=0, poisoned=()):
    dataset = Poisoned(6, poisoned, ())
    dataset.samples.tensors[0][sample, 0] = 2 * MARK
    share = SIZE // replicas
    return DataLoader(Subset(dataset, [i for i in range(len(dataset)) if i % SIZE // share == rank]), share)


def audit(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def named(options, model, sample, poisoned, path):
    """On a rank: what the audit names."""
    replicas = 2 if options is None else torch.distributed.get_world_size() // options["pipeline"]
    rank = torch.distributed.get_rank() % replicas
    callback = DivergenceRollback(audit=path)
    loader = marked(sample, replicas, rank, poisoned)
    run(model, loader, callback, strategy=Made(options)(), use_distributed_sampler=False)
    return {name: callback._audit.rows[0][name] for name in ("module", "rank", "batch", "micro_batch", "batches")}


@pytest.mark.parametrize(
    ("options", "size", "rank", "micro_batch"),
    [
        (None, 2, 1, 0),
        ({"pipeline": 1, "zero_stage": 3}, 2, 1, 1),
        ({"pipeline": 2}, 4, 3, 1),
        ({"pipeline": 2, "chunks": 2, "microbatches": 2}, 2, 0, 1),
    ],
    ids=str,
)
def test_the_first_module_is_named(options, size, rank, micro_batch, tmp_path):
    """Sample 11 is the last of batch 2: of the second micro-batch, and of the last replica."""
    for found in run_trainers(size, named, options, Marked, 11, (), str(tmp_path / "audit.csv")):
        assert found == {
            "module": "blocks.3",
            "rank": rank,
            "batch": 2,
            "micro_batch": micro_batch,
            "batches": "2",
        }
    (row,) = audit(tmp_path / "audit.csv")
    assert (row["module"], row["step"], row["back_to_step"], row["action"]) == ("blocks.3", "2", "0", "go on")


def test_a_label_on_the_last_stage_alone(tmp_path):
    for found in run_trainers(2, named, {"pipeline": 2}, Small, 0, (3,), str(tmp_path / "audit.csv")):
        assert (found["module"], found["rank"], found["batch"], found["micro_batch"]) == ("training_step", 1, 3, 0)


def test_retries_are_used_up(tmp_path):
    callback = DivergenceRollback(max_retries=2, audit=str(tmp_path / "audit.csv"))
    expected = r"diverged 3 times, each less than 100 steps after the one before, and max_retries=2(.|\n)*batches 5 of"
    with pytest.raises(RuntimeError, match=expected):
        run(Scheduled, data(poisoned=[3, 4, 5]), callback)
    assert [row["action"] for row in audit(tmp_path / "audit.csv")] == ["go on", "go on", "stopped"]
    assert [row["batches"] for row in audit(tmp_path / "audit.csv")] == ["3", "4", "5"]


def test_good_steps_begin_the_count_anew(tmp_path):
    callback = DivergenceRollback(max_retries=1, snapshot_every=2, audit=str(tmp_path / "audit.csv"))
    run(Scheduled, data(poisoned=[1, 4, 7, 10]), callback)
    assert callback.rollbacks == 4


class Distant(Small):
    """Its losses fall fast, from far above the later ones."""

    def __init__(self):
        super().__init__()
        torch.nn.init.constant_(self.outlet.bias, 20.0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.003)


class Raised(Callback):
    """Labels of batch 18 are far too high."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 18:
            batch[1].add_(1e3)


def test_a_spike_is_passed_by_the_window_of_its_snapshot(tmp_path):
    """Losses of the beginning, to which the run goes back, are far above those that the window has by then."""

    def trained(name, loader, *callbacks):
        callback = DivergenceRollback("spike", window=8, audit=str(tmp_path / name))
        return run(Distant, loader, callback, *callbacks), callback

    clean, other = trained("clean.csv", data(20, without=[18]))
    trainer, callback = trained("audit.csv", data(20), Raised())
    assert (callback.rollbacks, other.rollbacks) == (1, 0)
    assert [row["batches"] for row in audit(tmp_path / "audit.csv")] == ["18"]
    compared(weights(trainer), weights(clean))
    assert callback.state_dict()["spikes"] == other.state_dict()["spikes"]


@pytest.mark.parametrize("skip", [1, 2, 4])
def test_more_batches_are_left_out(skip, tmp_path):
    clean = run(Scheduled, data(without=range(8 - skip, 8)))
    callback = DivergenceRollback(skip_batches=skip, snapshot_every=3, audit=str(tmp_path / "audit.csv"))
    trainer = run(Scheduled, data(poisoned=[7]), callback)
    compared(weights(trainer), weights(clean))


class Stops(Callback):
    """Saves a checkpoint the nth time that so many steps have been taken, and stops there."""

    def __init__(self, step, times, path):
        self.step, self.times, self.path = step, times, path

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.times -= trainer.global_step == self.step
        if self.times == 0:
            trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt


def resumed(step, times, path, folder):
    """On a rank: a run that is stopped and goes on."""
    options = {"snapshot_every": 3, "audit": str(folder / "audit.csv")}
    first, second = DivergenceRollback(**options), DivergenceRollback(**options)
    with pytest.raises(SystemExit):
        run(Scheduled, data(poisoned=[5, 6]), first, Stops(step, times, path), strategy=hybrid())
    trainer = run(Scheduled, data(poisoned=[5, 6]), second, strategy=hybrid(), resume=path)
    return second.rollbacks, trainer.global_step, weights(trainer)


@pytest.mark.parametrize(("step", "times"), [(4, 2), (4, 3), (6, 1), (8, 1)])
def test_a_run_is_resumed_in_the_middle_of_a_retry(step, times, tmp_path):
    """Batches 5 and 6 are bad, and snapshots are after 0 and 3 steps: step 4 is taken again in each retry."""
    clean = run(Scheduled, data(without=[5, 6]))
    for rollbacks, steps, found in run_trainers(2, resumed, step, times, str(tmp_path / "stopped.ckpt"), tmp_path):
        assert (rollbacks, steps) == (2, 10)
        if found:
            compared(found, dict(weights(clean)), rtol=1e-9)


def test_a_lower_rate_is_that_of_every_later_step(tmp_path):
    """SGD without momentum: the run after batch 3 is that of half the rate."""

    class Plain(Small):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), self.rate)

    class Halved(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 0:
                trainer.optimizers[0].param_groups[0]["lr"] /= 2

    expected = run(Plain, data(without=[3]), Halved())
    callback = DivergenceRollback(on_retry="lower_lr", audit=str(tmp_path / "audit.csv"))
    found = run(Plain, data(poisoned=[3]), callback)  # from the beginning on: the only snapshot is there
    compared(weights(found), weights(expected))
    assert found.optimizers[0].param_groups[0]["lr"] == Plain.rate
    assert audit(tmp_path / "audit.csv")[0]["action"] == "lower_lr"


def test_an_optimizer_begins_anew_and_functions_are_called(tmp_path):
    class Restarted(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 4:
                trainer.optimizers[0].state.clear()

    seen, path = [], str(tmp_path / "audit.csv")
    expected = run(Scheduled, data(without=[6]), Restarted())
    options = {"snapshot_every": 4, "audit": path}
    found = run(Scheduled, data(poisoned=[6]), DivergenceRollback(on_retry="restart_optimizer", **options))
    compared(weights(found), weights(expected))

    def note(trainer, pl_module, retry):
        seen.append((trainer.global_step, retry))

    run(Scheduled, data(poisoned=[6, 7]), DivergenceRollback(on_retry=note, **options))
    assert seen == [(4, 1), (0, 2)]  # each further time from an older snapshot


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"detector": "inf"}, r"detector='inf' must be"),
        ({"keep": 0}, r"keep=0 must be"),
        ({"snapshot_every": 0.5}, r"snapshot_every=0.5 must be"),
        ({"skip_batches": 0}, r"skip_batches=0 must be"),
        ({"max_retries": True}, r"max_retries=True must be"),
        ({"on_retry": "lr"}, r"on_retry='lr' must be"),
        ({"lr_factor": 1}, r"lr_factor=1 must be"),
        ({"window": 1}, r"window=1 must be"),
    ],
)
def test_wrong_arguments_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        DivergenceRollback(**options)


class Manual(Small):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Fetching(Small):
    def training_step(self, dataloader_iter):
        return self.loss(next(dataloader_iter)[0])


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
def test_runs_that_cannot_go_back_are_refused(tmp_path):
    def refusal(model, *callbacks):
        with pytest.raises(ValueError, match=r"\.$") as caught:
            run(model, data(), *callbacks)
        return str(caught.value)

    assert "Manual optimizes manually" in refusal(Manual, DivergenceRollback())
    assert "fetches its own by dataloader_iter" in refusal(Fetching, DivergenceRollback())
    saving = DivergenceRollback(checkpoint_dir=str(tmp_path))
    assert "Leave checkpoint_dir out" in refusal(Small, saving, WeightAveraging())
    trainer = trainer_of()
    trainer.strategy.__class__ = DeepSpeedStrategy  # to make one, DeepSpeed must be there
    with pytest.raises(ValueError, match=r"does not know where DeepSpeedStrategy has its parameters"):
        DivergenceRollback().on_fit_start(trainer, Small())


def test_a_batch_that_cannot_be_copied_is_named():
    class Stubborn:
        def __deepcopy__(self, memo):
            raise NotImplementedError("no copies")

    def collate(samples):
        return [torch.stack(column) for column in zip(*samples, strict=True)] + [Stubborn()]

    class Three(Small):
        def loss(self, batch):
            return super().loss(batch[:2])

    loader = DataLoader(data().dataset, SIZE, collate_fn=collate)
    with pytest.raises(TypeError, match=r"keeps copies of batches, .* a list cannot be copied"):
        run(Three, loader, DivergenceRollback())
