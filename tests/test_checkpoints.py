"""Checkpoints between any two batches: any layout and ZeRO stage goes on from any other, with one process's numbers."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, DistributedSampler

from tests.launch import run_trainers
from tests.small import WIDTH, hybrid, samples, trainer_of, weights
from tests.test_zero import Odd

BATCHES, BATCH, EPOCHS, WINDOW = 6, 8, 2, 2
POINTS = {"mid-window": 2, "mid-epoch": 3, "end": 5}  # the first epoch's batch after which is saved
COLUMNS = {"blocks.*.linear": "colwise"}
LAYOUTS = {
    4: [
        {"pipeline": 2, "zero_stage": 1},
        {"pipeline": 2, "chunks": 2, "zero_stage": 3, "cpu_offload": True},
        {"pipeline": 1, "zero_stage": 3, "replicate_size": 2},
        {"pipeline": 1, "zero_stage": 2, "tensor_parallel_size": 2, "tensor_parallel_plan": COLUMNS},
        {"pipeline": 4, "zero_stage": 0},
    ],
    2: [
        {"pipeline": 1, "zero_stage": 2},
        {"pipeline": 2, "chunks": 3, "zero_stage": 1},
        {"pipeline": 1, "zero_stage": 0, "accumulate_on_cpu": True},
        {"pipeline": 1, "zero_stage": 1, "tensor_parallel_size": 2, "tensor_parallel_plan": COLUMNS},
    ],
    1: [{"pipeline": 1}],
}
ALL = [(size, index) for size, layouts in LAYOUTS.items() for index in range(len(layouts))]
KINDS, FORMS = ["adamw", "sgd", "momentum"], ["sharded", "full"]


class Mixed(Odd):
    """Tied weights, buffers, and the optimizer of choice."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False).double()
        self.tied.weight = self.inlet.weight
        self.register_buffer("shift", torch.full((1,), 0.25, dtype=torch.float64))
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.register_buffer("narrowed", torch.ones(3, dtype=torch.bfloat16))

    def forward(self, x):
        return super().forward(self.tied(x)) + self.shift

    def configure_optimizers(self):
        if self.kind == "adamw":
            return super().configure_optimizers()
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9 if self.kind == "momentum" else 0)


class Losses(Callback):
    """Keeps the losses; saves after some batches of the first epoch, as `{prefix}-{point}.ckpt`."""

    def __init__(self, prefix=None):
        self.seen, self.prefix = [], prefix

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(float(outputs["loss"]))
        for point in (point for point, last in POINTS.items() if last == batch_idx and trainer.current_epoch == 0):
            if self.prefix is not None:
                trainer.save_checkpoint(f"{self.prefix}-{point}.ckpt")


def share(layout):
    """A replica's part of each batch; ranks of the tensor axis, which are neighbours, have the same."""
    tensor = layout.get("tensor_parallel_size", 1)
    data = dist.get_world_size() // layout["pipeline"] // tensor
    sampler = DistributedSampler(samples(BATCHES * BATCH), data, dist.get_rank() // tensor % data, shuffle=False)
    return DataLoader(samples(BATCHES * BATCH), BATCH // data, sampler=sampler)


def train(layout, kind, resume=None, prefix=None, state_dict_type="sharded", epochs=EPOCHS):
    """Train on, or from the start; the Trainer, and the losses."""
    losses = Losses(prefix)
    strategy = "auto" if layout is None else hybrid(**layout, state_dict_type=state_dict_type)
    batches = DataLoader(samples(BATCHES * BATCH), BATCH) if layout is None else share(layout)
    trainer = trainer_of(strategy, max_epochs=epochs, accumulate_grad_batches=WINDOW, callbacks=[losses])
    trainer.fit(Mixed(kind), batches, ckpt_path=resume)
    return trainer, losses.seen


def whole_state(trainer):
    """Weights and optimizer states over the whole model, on rank 0."""
    state = trainer.strategy.optimizer_state(trainer.optimizers[0])
    return dict(weights(trainer)), state.get("state"), [group["lr"] for group in state.get("param_groups", [])]


def kind_of(index):
    """The optimizer of a layout's saved run."""
    return KINDS[index % len(KINDS)]


def save_all(folder):
    size = dist.get_world_size()
    for index, layout in enumerate(LAYOUTS[size]):
        train(layout, kind_of(index), prefix=folder / f"{size}-{index}", state_dict_type=FORMS[index % 2])


def task(size, index, turn):
    """A layout, which saved one it goes on from, and from where."""
    place = (ALL.index((size, index)) + 3 + turn) % len(ALL)
    return index, ALL[place], list(POINTS)[(place // 3 + turn) % len(POINTS)]


def go_on(folder, tasks):
    found = []
    for index, source, point in tasks:
        path = folder / f"{source[0]}-{source[1]}-{point}.ckpt"
        trainer, losses = train(LAYOUTS[dist.get_world_size()][index], kind_of(source[1]), path)
        found.append((losses, whole_state(trainer)))
    return found


@pytest.fixture(scope="module")
def expected():
    """Of each optimizer, losses and states of a run of one process without a stop."""
    found = {}
    for kind in KINDS:
        trainer, losses = train(None, kind)
        found[kind] = losses, whole_state(trainer)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    for size in LAYOUTS:
        run_trainers(size, save_all, path, timeout=300)
    return path


@pytest.mark.filterwarnings("ignore:.*It has no rule for parts")
@pytest.mark.parametrize("sources", [1, pytest.param(len(ALL), marks=pytest.mark.full)])
@pytest.mark.parametrize("size", LAYOUTS)
def test_any_layout_goes_on_from_any_other(folder, expected, size, sources):
    """Case 17 and case 18: from as many of the saved ones as are asked for, with one from another for each."""
    tasks = [task(size, index, turn) for index in range(len(LAYOUTS[size])) for turn in range(sources)]
    outcomes = run_trainers(size, go_on, folder, tasks, timeout=300)
    for place, (index, source, point) in enumerate(tasks):
        kind = kind_of(source[1])
        losses, (state, moments, rates) = expected[kind]
        about = f"{LAYOUTS[size][index]} from {LAYOUTS[source[0]][source[1]]}, {kind}, {point}"
        for seen, _ in (rank[place] for rank in outcomes):
            same(seen, losses[POINTS[point] + 1 :], about)
        same(outcomes[0][place][1], (state, moments, rates), about)


def same(found, expected, about):
    assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=lambda message: f"{about}: {message}")
