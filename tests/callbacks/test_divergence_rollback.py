"""A run that goes back before a poisoned batch ends as one that never had it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_hybrid.callbacks import DivergenceRollback
from tests.callbacks.test_weight_decay_rules import PLAN, Mlp
from tests.launch import run_trainers
from tests.small import Small, hybrid, samples, trainer_of, weights
from tests.test_expert_parity import Mixture

SIZE = 4  # samples of a batch over all replicas


class Poisoned(Dataset):
    """Labels of the first sample of some batches are NaN; other batches are left out."""

    def __init__(self, batches, poisoned, without):
        self.samples = samples(SIZE * batches)
        self.places = [i for i in range(len(self.samples)) if i // SIZE not in without]
        for batch in poisoned:
            self.samples.tensors[1][batch * SIZE] = torch.nan

    def __len__(self):
        return len(self.places)

    def __getitem__(self, index):
        return self.samples[self.places[index]]


def data(batches=12, poisoned=(), without=(), replicas=1):
    """Batches in order, shared out over the replicas: a poisoned one is on the first of them."""
    dataset = Poisoned(batches, poisoned, without)
    if replicas > 1:
        rank, share = dist.get_rank() % replicas, SIZE // replicas
        dataset = Subset(dataset, [i for i in range(len(dataset)) if i % SIZE // share == rank])
    return DataLoader(dataset, SIZE // replicas)


class Scheduled(Small):
    """With Adam and schedules by step and by epoch."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        by_step = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        by_epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        return [optimizer], [{"scheduler": by_step, "interval": "step"}, {"scheduler": by_epoch, "interval": "epoch"}]


class Stateful(Scheduled):
    """With dropout, batch normalisation, and a count of its own."""

    def __init__(self):
        super().__init__()
        self.norm, self.dropout, self.seen = nn.BatchNorm1d(6, dtype=torch.float64), nn.Dropout(0.2), []

    def forward(self, x):
        return super().forward(self.dropout(self.norm(x)))

    def training_step(self, batch, batch_idx):
        self.seen.append(float(batch[1][-1]))
        return super().training_step(batch, batch_idx)


def run(model, loader, *callbacks, strategy="auto", resume=None, **options):
    torch.manual_seed(1)
    trainer = trainer_of(strategy, callbacks=list(callbacks), **options)
    trainer.fit(model(), loader, ckpt_path=resume)
    return trainer


def compared(found, expected, rtol=0.0):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol / 100)


@pytest.mark.parametrize(
    ("model", "poisoned", "options", "accumulate"),
    [
        (Stateful, [5], {"snapshot_every": 3}, 1),
        (Stateful, [0], {}, 1),
        (Stateful, [11], {"snapshot_every": 4, "keep": 1}, 1),
        (Stateful, [3, 4, 9], {"snapshot_every": 4}, 1),
        (Scheduled, [6], {"snapshot_every": 2}, 2),
        (Scheduled, [9, 11], {"snapshot_every": 2}, 3),
    ],
)
def test_one_process(model, poisoned, options, accumulate, tmp_path):
    without = {i // accumulate * accumulate + j for i in poisoned for j in range(accumulate)}
    common = {"accumulate_grad_batches": accumulate, "max_epochs": 2}
    clean = run(model, data(without=without), **common)
    callback = DivergenceRollback(audit=str(tmp_path / "audit.csv"), **options)
    trainer = run(model, data(poisoned=poisoned), callback, **common)
    assert callback.rollbacks == 2 * len({i // accumulate for i in poisoned})
    assert trainer.global_step == clean.global_step
    compared(weights(trainer), weights(clean))
    for found, expected in zip(trainer.lr_scheduler_configs, clean.lr_scheduler_configs, strict=True):
        assert found.scheduler.state_dict() == expected.scheduler.state_dict()
    if model is Stateful:
        assert trainer.lightning_module.seen == clean.lightning_module.seen


class Split(Scheduled):
    """Blocks that tensor parallelism splits."""

    block = Mlp


class Experts(Scheduled):
    """Blocks with experts."""

    block, depth = Mixture, 2

    def loss(self, batch):
        return super().loss([tensor[:, None] for tensor in batch])


def rolled_back(model, make, poisoned, replicas, options, common):
    """On a rank: the weights, and how often the run went back."""
    callback = DivergenceRollback(**options)
    loader = data(poisoned=poisoned, replicas=replicas)
    trainer = run(model, loader, callback, strategy=make(), use_distributed_sampler=False, **common)
    return weights(trainer), callback.rollbacks, trainer.global_step


LAYOUTS = {
    "pipeline 2": ({"pipeline": 2}, 2),
    "pipeline 2 x data 2": ({"pipeline": 2, "zero_stage": 0}, 4),
    "zero 1": ({"pipeline": 2, "zero_stage": 1}, 4),
    "zero 2": ({"pipeline": 1, "zero_stage": 2}, 2),
    "zero 3": ({"pipeline": 2, "zero_stage": 3}, 4),
    "offload": ({"pipeline": 1, "zero_stage": 2, "cpu_offload": True}, 2),
    "interleaved": ({"pipeline": 2, "chunks": 2}, 2),
    "accumulate on cpu": ({"pipeline": 1, "zero_stage": 1, "accumulate_on_cpu": True}, 2),
    "copies": ({"pipeline": 1, "zero_stage": 3, "replicate_size": 2}, 4),
    "tensor 2": ({"pipeline": 1, "tensor_parallel_size": 2, "tensor_parallel_plan": PLAN}, 2),
    "experts 2": ({"pipeline": 1, "microbatches": 1, "expert_parallel_size": 2}, 2),
    "data 4": ({"pipeline": 1, "zero_stage": 0}, 4),
}


MODELS = {"tensor 2": Split, "experts 2": Experts}


class Made:
    """Makes a strategy on a rank.

    Args:
        options: Of `hybrid`; None is "ddp".
    """

    def __init__(self, options):
        self.options = options

    def __call__(self):
        return hybrid(**self.options) if self.options is not None else "ddp"


@pytest.mark.parametrize("name", [*LAYOUTS, "ddp"])
def test_layouts(name, tmp_path):
    options, size = LAYOUTS.get(name, (None, 4))
    replicas = size // (options or {}).get("pipeline", 1) // (options or {}).get("tensor_parallel_size", 1)
    model = MODELS.get(name, Scheduled)
    settings = {"snapshot_every": 2, "audit": str(tmp_path / "audit.csv")}
    window = 1 if name == "experts 2" else 2  # stock strategies leave balance losses undivided by it
    common = {"max_epochs": 2, "accumulate_grad_batches": window}
    without = [1, 6] if window == 1 else [0, 1, 6, 7]
    clean = run(model, data(without=without), **common)
    job = (model, Made(options), [1, 6], replicas, settings, common)
    for found, rollbacks, steps in run_trainers(size, rolled_back, *job):
        assert rollbacks == 4
        assert steps == clean.global_step
        if found:
            compared(found, dict(weights(clean)), rtol=1e-9)


@pytest.mark.parametrize("name", ["one process", "zero 3", "zero 1", "interleaved", "ddp"])
def test_checkpoints_for_snapshots(name, tmp_path):
    folder = tmp_path / "snapshots"
    settings = {"snapshot_every": 2, "checkpoint_dir": str(folder), "audit": str(tmp_path / "audit.csv")}
    clean = run(Scheduled, data(without=[1, 6]), max_epochs=2)
    if name == "one process":
        found = weights(run(Scheduled, data(poisoned=[1, 6]), DivergenceRollback(**settings), max_epochs=2))
    else:
        options, size = LAYOUTS.get(name, (None, 2))
        replicas = size // (options or {}).get("pipeline", 1)
        found, _, steps = run_trainers(
            size, rolled_back, Scheduled, Made(options), [1, 6], replicas, settings, {"max_epochs": 2}
        )[0]
        assert steps == clean.global_step
    compared(found, dict(weights(clean)), rtol=0.0 if name == "one process" else 1e-9)
    assert not list(folder.iterdir())
