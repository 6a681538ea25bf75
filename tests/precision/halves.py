"""A float32 model for tests of 16 bits, and what its fits give."""

import torch
from lightning.pytorch import Callback
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_hybrid.precision import FP16MasterWeights
from tests.small import WIDTH, Block, Small, fit, hybrid, loader, weights

BATCHES, BATCH = 4, 8
MODERATE = 2.0**10  # a loss scale with which these models do not overflow


def precise(name):
    """Options of a Trainer for a precision; whether a step overflows may depend on the layout, so that none shall."""
    return {"plugins": [FP16MasterWeights(init_scale=MODERATE)]} if name == "16-true" else {"precision": name}


class Normed(Block):
    """A layer norm meets 16 bits and float32; a softmax has few classes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x))).softmax(-1)


class Half(Small):
    """In float32, with a scalar, an odd matrix and a parameter of no use."""

    block, depth, rate = Normed, 4, 0.01

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.turned = nn.Parameter(torch.randn(3, WIDTH).t())
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.float()

    def forward(self, x):
        return super().forward(x * self.scale + (x @ self.turned).sum(1, keepdim=True))

    def loss(self, batch):
        x, y = batch
        return super().loss((x.float(), y.float()))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.rate)


class Losses(Callback):
    """The losses of all batches, and after each step a number that differs where any bit of a parameter differs."""

    def __init__(self):
        self.losses, self.sums = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.sums.append(bits(pl_module))


def bits(module):
    """A hash of all parameters that are here, whole."""
    state = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in module.named_parameters()}
    return {name: torch.hash_tensor(value.detach()).item() for name, value in state.items()}


def trained(model, data=1, epochs=2, accumulate=1, strategy=None, **options):
    """(losses, weights on rank 0, hashes of what is here after each step)."""
    seen = Losses()
    trainer = fit(
        model(),
        loader(BATCHES * BATCH, BATCH, data),
        strategy or hybrid(**options.pop("hybrid", {})),
        callbacks=[seen],
        max_epochs=epochs,
        accumulate_grad_batches=accumulate,
        **{"gradient_clip_val": 0.5, **options},
    )
    return seen.losses, weights(trainer), seen.sums
