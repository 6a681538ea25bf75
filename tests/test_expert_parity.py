"""Experts split over the data axis: every layout gives the numbers of one process on the global batch."""

from functools import cache
from typing import NamedTuple

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_hybrid import HybridPTDPStrategy
from lightning_hybrid.experts.layer import MoELayer
from tests.launch import run_trainers
from tests.small import WIDTH, Small, trainer_of

NUM_EXPERTS, SAMPLES, LENGTH, STEPS, CLIP = 4, 8, 3, 3, 0.2


class Mixture(nn.Module):
    """The two best of four experts for each token, and one for all."""

    def __init__(self):
        super().__init__()
        self.mixture = MoELayer(WIDTH, 5, NUM_EXPERTS, shared_experts=1, balance_loss=0.3)

    def forward(self, x):
        return x + self.mixture(x)


class Mixtures(Small):
    block, depth = Mixture, 2

    def configure_optimizers(self):
        experts = [p for name, p in self.named_parameters() if "experts" in name]
        rest = [p for name, p in self.named_parameters() if "experts" not in name]
        return torch.optim.AdamW([{"params": rest, "lr": 0.02}, {"params": experts, "lr": 0.01, "weight_decay": 0.1}])

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class Deep(Mixtures):
    depth = 4  # two chunks on each of two ranks


class Row(NamedTuple):
    """A layout: sizes of the axes, and what else is asked for."""

    data: int
    expert: int
    tensor: int = 1
    pipeline: int = 1
    zero: int = 0
    accumulate: int = 1
    chunks: int = 1
    replicate: int = 1

    @property
    def module(self):
        return Deep if self.chunks > 1 else Mixtures


ROWS = [
    Row(1, 1),
    *(Row(2, 1, zero=zero) for zero in (0, 3)),
    *(Row(2, 2, zero=zero, accumulate=1 + zero % 2) for zero in range(4)),
    *(Row(4, 2, zero=zero, accumulate=2 - zero % 2) for zero in range(4)),
    *(Row(4, 4, zero=zero) for zero in (0, 1, 3)),
    Row(4, 2, zero=1, replicate=2, accumulate=2),
    Row(4, 2, zero=3, replicate=2),
    *(Row(2, 2, tensor=2, zero=zero) for zero in (0, 2)),
    *(Row(2, 2, pipeline=2, zero=zero, accumulate=1 + zero % 2) for zero in range(4)),
    Row(2, 2, pipeline=2, chunks=2, zero=2),
]


def data(number):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(number, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(2, keepdim=True).sin())


def loader(samples, rank=0, replicas=1, each=SAMPLES):
    sampler = DistributedSampler(samples, replicas, rank, shuffle=False)
    return DataLoader(samples, each // replicas, sampler=sampler)


class Steps(Callback):
    """The loss of each batch, and the norm of the gradients of each step before they are clipped."""

    def __init__(self):
        self.losses, self.norms = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(trainer.callback_metrics["loss"]))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if isinstance(trainer.strategy, HybridPTDPStrategy):
            norm = trainer.strategy.gradient_norm(optimizer)
        else:
            norm = torch.nn.utils.get_total_norm([p.grad for p in pl_module.parameters()])
        self.norms.append(float(norm))


def observed(module, strategy, accumulate, rank=0, replicas=1, devices=1, each=SAMPLES):
    """Losses and norms of three clipped steps, the weights and the optimizer's state."""
    steps = Steps()
    trainer = trainer_of(
        strategy=strategy,
        devices=devices,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=CLIP,
        max_epochs=1,
        callbacks=steps,
    )
    samples = data(each * STEPS * accumulate)
    trainer.fit(module, loader(samples, rank, replicas, each))
    return (
        (steps.losses, steps.norms),
        trainer.strategy.lightning_module_state_dict(),
        trainer.strategy.optimizer_state(trainer.optimizers[0]),
    )


def fit_rows(rows):
    outcomes = []
    for row in rows:
        strategy = HybridPTDPStrategy(
            pipeline_parallel_size=row.pipeline,
            tensor_parallel_size=row.tensor,
            expert_parallel_size=row.expert,
            num_chunks=row.chunks,
            replicate_size=row.replicate,
            zero_stage=row.zero,
            num_microbatches=2 if row.pipeline > 1 else 1,
        )
        size = row.data * row.tensor * row.pipeline
        rank = torch.distributed.get_rank() // row.tensor % row.data if torch.distributed.is_initialized() else 0
        outcomes.append(observed(row.module(), strategy, row.accumulate, rank, row.data, size))
    return outcomes


@cache
def expected(module, accumulate):
    """Each window is one batch in one process: plain Lightning does not scale auxiliary losses by windows."""
    return observed(module(), "auto", 1, each=SAMPLES * accumulate)


@pytest.mark.filterwarnings("ignore:tensor_parallel_size=2 splits nothing")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_layout_gives_the_numbers_of_one_process(size):
    rows = [row for row in ROWS if row.data * row.tensor * row.pipeline == size]
    outcomes = run_trainers(size, fit_rows, rows, timeout=300)
    for index, row in enumerate(rows):
        (losses, norms), weights, state = outcomes[0][index]
        (wanted_losses, wanted_norms), wanted, wanted_state = expected(row.module, row.accumulate)
        close = {"rtol": 1e-9, "atol": 1e-12, "msg": lambda text, row=row: f"{row}: {text}"}
        if row.accumulate == 1:
            assert_close(losses, wanted_losses, **close)
        assert_close(norms, wanted_norms, **close)
        assert len(norms) == STEPS
        assert min(norms) > CLIP, "a step was not clipped"
        assert_close(dict(weights), dict(wanted), **close)
        assert_close(state["state"], wanted_state["state"], **close)
