"""A small float64 LightningModule over a list of blocks, and fits of it in one process or on every rank of a launch."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_hybrid import HybridPTDPStrategy
from tests.launch import run_trainers

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

    block, depth, rate = Block, 6, 0.02

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


def loader(number, batch_size, data=1, seed=0):
    """Batches of `batch_size` samples over all replicas, in order; Lightning's own sampler would shuffle them."""
    dataset = samples(number, seed)
    share = DistributedSampler(dataset, data, dist.get_rank() % data, shuffle=False) if data > 1 else None
    return DataLoader(dataset, batch_size // data, sampler=share)


def hybrid(pipeline=2, chunks=1, microbatches=2, **options):
    return HybridPTDPStrategy(
        pipeline_parallel_size=pipeline, num_chunks=chunks, num_microbatches=microbatches, **options
    )


def trainer_of(strategy="auto", **options):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    devices = dist.get_world_size() if dist.is_initialized() else 1
    return Trainer(accelerator="cpu", strategy=strategy, **{"devices": devices, "max_epochs": 1, **quiet, **options})


def fit(module, train, strategy="auto", val=None, **options):
    trainer = trainer_of(strategy, **options)
    trainer.fit(module, train, val)
    return trainer


def weights(trainer):
    """The whole model's state: on rank 0, or in one process; empty on other ranks."""
    return trainer.strategy.lightning_module_state_dict()


class Watch(Callback):
    """Keeps copies of all three dictionaries at every moment at which a callback may look at them."""

    def __init__(self):
        self.seen = []

    def look(self, moment, trainer):
        kinds = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
        values = {f"{kind} {name}": float(v) for kind in kinds for name, v in getattr(trainer, kind).items()}
        self.seen.append((moment, values))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.look(f"train batch {batch_idx}, {_rounded(outputs)}", trainer)

    def on_train_epoch_end(self, trainer, pl_module):
        self.look("train epoch", trainer)

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.look(f"validation batch {batch_idx}, {_rounded(outputs)}", trainer)

    def on_validation_end(self, trainer, pl_module):
        self.look("validation", trainer)

    def on_train_end(self, trainer, pl_module):
        self.look("end", trainer)


def _rounded(outputs):
    scalars = outputs if isinstance(outputs, dict) else {"output": outputs}
    return {name: round(float(value), 8) for name, value in scalars.items() if value is not None}


def assert_same(found, expected, rel=1e-9):
    """Two lists of `Watch.seen` agree in every value at every moment."""
    assert [moment for moment, _ in found] == [moment for moment, _ in expected]
    for (moment, values), (_, reference) in zip(found, expected, strict=True):
        assert set(values) == set(reference), f"{moment}: {set(values) ^ set(reference)}"
        near = {name: pytest.approx(value, rel=rel, abs=rel / 1000) for name, value in reference.items()}
        wrong = {name: (values[name], reference[name]) for name in reference if values[name] != near[name]}
        assert not wrong, f"{moment}: found and expected are {wrong}"


def refusal(model, options, microbatches=2):
    """On a rank: what fit says, and whether nothing was trained before."""
    module, trainer = model(), trainer_of(hybrid(microbatches=microbatches, **options))
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    with pytest.raises((RuntimeError, ValueError)) as caught:
        trainer.fit(module, loader(8, 4))
    same = all(torch.equal(before[name], parameter) for name, parameter in module.named_parameters())
    return str(caught.value), trainer.global_step == 0 and same


def refusals(models, options):
    return [refusal(model, options) for model in models]


def check_refused(patterns, size=2, **options):
    """For each model that the patterns are of, every rank says what the pattern asks for, and none has trained."""
    for outcomes in run_trainers(size, refusals, list(patterns), options, timeout=60):
        for (message, untouched), pattern in zip(outcomes, patterns.values(), strict=True):
            assert re.search(pattern, message, re.DOTALL), f"{message}\n\ndoes not match\n\n{pattern}"
            assert untouched


def trained(model, options, data=1):
    """On a rank: the weights after an epoch of two batches, and how many steps it took."""
    trainer = fit(model(), loader(8, 4, data), hybrid(**options))
    return weights(trainer), trainer.global_step


def check_exact(model, size=2, **options):
    """The ranks train as one process does with an ordinary strategy."""
    data = size // options.get("pipeline", 2)
    found, steps = run_trainers(size, trained, model, options, data)[0]
    reference = fit(model(), loader(8, 4))
    assert steps == reference.global_step
    torch.testing.assert_close(found, dict(weights(reference)))


def loss_of_two_epochs(model, options):
    """On a rank: the error of a fit, or whether all of its losses and weights were finite."""
    module = model()
    try:
        trainer = fit(module, loader(8, 4), hybrid(**options), max_epochs=2)
    except RuntimeError as error:
        return str(error)
    return all(bool(value.isfinite().all()) for value in weights(trainer).values())
