"""Rules of weight decay under a Trainer: any optimizer and strategy trains as with groups that were made by hand."""

import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_hybrid import HybridPTDPStrategy
from lightning_hybrid.callbacks import WeightDecayRules
from lightning_hybrid.cli.main import main
from tests.launch import run_ranks, run_trainers
from tests.small import WIDTH, Small, fit, hybrid, loader, trainer_of, weights

RULES = {"*.bias": 0, "LayerNorm": 0.5, "outlet": 2.0}
DECAY = 0.3
PLAN = {"*.fc1": "colwise", "*.fc2": "rowwise"}
LAYOUTS = {  # of two ranks
    "pipeline 2": {"pipeline_parallel_size": 2, "num_microbatches": 2},
    "zero 3": {"pipeline_parallel_size": 1, "num_microbatches": 2, "zero_stage": 3},
    "tensor 2": {"pipeline_parallel_size": 1, "tensor_parallel_size": 2, "tensor_parallel_plan": PLAN},
}


class Mlp(nn.Module):
    """A block that tensor parallelism splits."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x):
        return x + self.fc2(torch.tanh(self.fc1(self.norm(x))))


class Net(Small):
    block, depth = Mlp, 2

    def schedule(self, groups):
        optimizer = torch.optim.SGD(groups, self.rate, momentum=0.9, weight_decay=DECAY)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_optimizers(self):
        return self.schedule(self.parameters())


class ByHand(Net):
    """The groups that the rules make."""

    def configure_optimizers(self):
        named = dict(self.named_parameters())
        biases = [p for name, p in named.items() if name.endswith("bias")]
        norms = [p for name, p in named.items() if "norm.weight" in name]
        outlet = [self.outlet.weight]
        others = [p for p in named.values() if all(p is not other for other in biases + norms + outlet)]
        decays = [(others, 1), (biases, 0), (norms, 0.5), (outlet, 2)]
        return self.schedule([{"params": group, "weight_decay": DECAY * factor} for group, factor in decays])


class Bare(Net):
    """Leaves the optimizer to the command line."""

    configure_optimizers = LightningModule.configure_optimizers


class Data(LightningDataModule):
    def __init__(self, data: int = 1):
        super().__init__()
        self.data = data

    def train_dataloader(self):
        return loader(12, 4, self.data)


def rules():
    return WeightDecayRules({"*.bias": 0, nn.LayerNorm: 0.5, "outlet": 2.0})


def steps(module, strategy="auto", data=1, **options):
    """The Trainer after three steps, or after the three that follow on those of a checkpoint."""
    path = options.pop("ckpt_path", None)
    trainer = trainer_of(strategy, **options)
    trainer.fit(module, loader(12, 4, data), ckpt_path=path)
    return trainer


def data_ranks(layout):
    return 2 if "zero" in layout else 1


def by_layout(folder):
    """On a rank: weights after three steps under each layout, and after three more that follow on those of a file."""
    found = {}
    for layout, options in LAYOUTS.items():
        trainer = steps(Net(), HybridPTDPStrategy(**options), data_ranks(layout), callbacks=[rules()])
        trainer.save_checkpoint(folder / f"{layout}.ckpt")
        on = {"max_epochs": 2, "ckpt_path": folder / f"{next(iter(LAYOUTS))}.ckpt", "callbacks": [rules()]}
        more = steps(Net(), HybridPTDPStrategy(**options), data_ranks(layout), **on)
        found[layout] = weights(trainer), weights(more)
    return found


def test_layouts_train_and_resume_as_one_process_with_groups_by_hand(tmp_path, capsys):
    expected = steps(ByHand()), steps(ByHand(), max_epochs=2)
    plain = steps(Net())
    assert all(not torch.equal(value, weights(plain)[name]) for name, value in weights(expected[0]).items())
    found = run_trainers(2, by_layout, tmp_path)[0]
    for layout in LAYOUTS:
        for state, reference in zip(found[layout], expected, strict=True):
            torch.testing.assert_close(state, dict(weights(reference)), rtol=1e-9, atol=0)
        resumed = steps(Net(), max_epochs=2, callbacks=[rules()], ckpt_path=tmp_path / f"{layout}.ckpt")
        torch.testing.assert_close(dict(weights(resumed)), dict(weights(expected[1])), rtol=1e-9, atol=0)


