"""A model of everything that layouts deal out, and its training with each optimizer in any of them."""

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from lightning_hybrid.experts import MoELayer
from lightning_hybrid.optim import SM3, Adafactor, Lamb, Lars, RMSpropToSGD
from tests.small import Small, hybrid, trainer_of
from tests.test_expert_parity import WIDTH, data, loader

HIDDEN, EXPERTS, STEPS, BATCH = 14, 4, 4, 8
OPTIMIZERS = {
    "lars": partial(Lars, lr=0.5, momentum=0.9, weight_decay=0.1, trust_coefficient=0.1),
    "lars-all": partial(Lars, lr=0.5, momentum=0.9, nesterov=True, adapt=True, max_trust_ratio=0.05),
    "lamb": partial(Lamb, lr=0.05, weight_decay=0.1, eps=1e-3),
    "lamb-plain": partial(Lamb, lr=0.05, bias_correction=False, adapt=True, weight_norm_bounds=(0.0, 1.5), eps=1e-3),
    "adafactor": partial(Adafactor, lr=0.05, weight_decay=0.1, min_dim_size_to_factor=5),
    "adafactor-plain": partial(Adafactor, lr=0.01, scale_parameter=False, relative_step=False),
    "sm3": partial(SM3, lr=0.1, momentum=0.9, weight_decay=0.1),
    "rmsprop-to-sgd": partial(RMSpropToSGD, lr=0.05, steps_per_epoch=1, center=2.0, period=3.0, weight_decay=0.1),
}


class Part(nn.Module):
    """Attention, an odd perceptron and a mixture: slices of thirds, uneven slices and banks of experts."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, bias=False, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.mixture = MoELayer(WIDTH, 5, EXPERTS)
        self.gate = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.gate * self.down(torch.tanh(self.up(x))) + self.mixture(x)


class Parts(Small):
    block, depth = Part, 2

    def __init__(self, optimizer):
        super().__init__()
        self.optimizer = optimizer

    def configure_optimizers(self):
        matrices = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in self.parameters() if parameter.ndim <= 1]
        return OPTIMIZERS[self.optimizer]([{"params": matrices}, {"params": others, "weight_decay": 0.0}])


class Row(NamedTuple):
    """A layout: sizes of the axes, and what else is asked for."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    expert: int = 1
    zero: int = 0
    replicate: int = 1
    cpu_offload: bool = False

    @property
    def size(self):
        return self.data * self.pipeline * self.tensor

    def strategy(self, **options):
        if self.size == 1 and not options:
            return "auto"
        return hybrid(
            self.pipeline,
            microbatches=self.pipeline,
            tensor_parallel_size=self.tensor,
            tensor_parallel_plan={"*.attention": "heads", "*.up": "colwise", "*.down": "rowwise"},
            expert_parallel_size=self.expert,
            zero_stage=self.zero,
            replicate_size=self.replicate,
            cpu_offload=self.cpu_offload,
            **options,
        )


def train(optimizer, row, steps=STEPS, *, save=None, resume=None, **options):
    """Weights and the optimizer's state after some steps; of the first process, empty elsewhere."""
    trainer = trainer_of(row.strategy(**options), max_steps=steps, max_epochs=-1)
    rank = dist.get_rank() // row.tensor % row.data if dist.is_initialized() else 0
    trainer.fit(Parts(optimizer), loader(data(BATCH * STEPS), rank, row.data, BATCH), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    state = trainer.strategy.optimizer_state(trainer.optimizers[0])
    return dict(trainer.strategy.lightning_module_state_dict()), state.get("state")


def train_all(tasks):
    """For each (optimizer, row), what `train` gives."""
    return [train(optimizer, row) for optimizer, row in tasks]


def save_all(folder, tasks):
    """Train the first half of the steps, each (name, optimizer, row, form) into a checkpoint of that name."""
    for name, optimizer, row, form in tasks:
        train(optimizer, row, STEPS // 2, state_dict_type=form, save=folder / name)


def go_on(folder, tasks):
    """Train the second half from each (name, optimizer, row)."""
    return [train(optimizer, row, resume=folder / name, state_dict_type="full") for name, optimizer, row in tasks]


def train_twice(optimizer, row):
    """Weights after two runs of one Trainer, the second with a new optimizer over what the first left."""
    trainer = trainer_of(row.strategy(), limit_train_batches=STEPS // 2)
    rank = dist.get_rank() // row.tensor % row.data if dist.is_initialized() else 0
    module, batches = Parts(optimizer), loader(data(BATCH * STEPS), rank, row.data, BATCH)
    for num_epochs in (1, 2):
        trainer.fit_loop.max_epochs = num_epochs
        trainer.fit(module, batches)
    return dict(trainer.strategy.lightning_module_state_dict())


def train_all_twice(tasks):
    return [train_twice(optimizer, row) for optimizer, row in tasks]
