"""Small float64 LightningModules over a list of blocks, and fits of them in one process or on every rank of a launch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import HybridPTDPStrategy

WIDTH = 6
LAYOUTS = [(2, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 1)]  # pipeline, data, chunks


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Small(LightningModule):
    """A regression; what a test is about is a subclass, whose hooks are called as Lightning does."""

    block, depth, rate = Block, 6, 0.1

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.inlet, self.outlet = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(self.block() for _ in range(self.depth))
        self.double()

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)

    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self(x), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.rate, momentum=0.9)


def samples(number, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sin().sum(1, keepdim=True) + torch.arange(number)[:, None] / number)


def loader(number, batch_size, seed=0):
    """Batches in order; under data parallelism the replicas' batches together are one of a loader of all of them."""
    return DataLoader(samples(number, seed), batch_size)


def hybrid(pipeline=2, chunks=1, microbatches=2, **options):
    return HybridPTDPStrategy(
        pipeline_parallel_size=pipeline, num_chunks=chunks, num_microbatches=microbatches, **options
    )


def trainer_of(strategy="auto", **options):
    quiet = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")}
    devices = dist.get_world_size() if dist.is_initialized() else 1
    return Trainer(accelerator="cpu", devices=devices, strategy=strategy, **{"max_epochs": 1, **quiet, **options})


def fit(module, train, strategy="auto", val=None, **options):
    trainer = trainer_of(strategy, **options)
    trainer.fit(module, train, val)
    return trainer


def weights(trainer):
    """The whole model's state: on rank 0, or in one process; empty on other ranks."""
    return trainer.strategy.lightning_module_state_dict()
