"""What a run does about a collapse: whom it names, how often it tries, what it changes, and how it is resumed."""

import csv

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, Subset

from lightning_hybrid.callbacks import DivergenceRollback
from tests.callbacks.test_divergence_rollback import SIZE, Made, Poisoned, Scheduled, compared, data, run
from tests.launch import run_trainers
from tests.small import Block, Small, hybrid, weights

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
    with pytest.raises(RuntimeError, match=r"diverged 3 times within 100 steps, and max_retries=2(.|\n)*batches 5 of"):
        run(Scheduled, data(poisoned=[3, 4, 5]), callback)
    assert [row["action"] for row in audit(tmp_path / "audit.csv")] == ["go on", "go on", "stopped"]
    assert [row["batches"] for row in audit(tmp_path / "audit.csv")] == ["3", "4", "5"]


def test_good_steps_begin_the_count_anew(tmp_path):
    callback = DivergenceRollback(max_retries=1, snapshot_every=2, audit=str(tmp_path / "audit.csv"))
    run(Scheduled, data(poisoned=[1, 4, 7, 10]), callback)
    assert callback.rollbacks == 4


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
