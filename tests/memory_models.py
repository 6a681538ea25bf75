"""Models on which techniques that save memory must change no bit: dropout, statistics, an encoder and a decoder."""

import hashlib
import random

import numpy
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import T5Config, T5ForConditionalGeneration

from examples import gpt, moe, networks
from tests.small import trainer_of

STEPS, BATCH, LENGTH = 3, 4, 8


class Block(gpt.Block):
    """With dropout, and with random numbers of Python and NumPy."""

    def forward(self, x):
        x = F.dropout(super().forward(x), 0.1, self.training)
        return x * (1 + (random.random() + numpy.random.random()) / 100) if self.training else x


class GPT(gpt.GPT):
    """The example, dropout on."""

    def __init__(self):
        super().__init__(width=16, depth=6, heads=2, context=LENGTH)
        self.blocks = nn.ModuleList(Block(16, 2) for _ in range(6))

    @staticmethod
    def batches():
        return list(torch.randint(256, (STEPS, BATCH, LENGTH + 1)))


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x):
        return x + self.norm(self.convolution(x)).relu_()


class ResNet(LightningModule):
    """With batch norms."""

    def __init__(self):
        super().__init__()
        self.inlet = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(6) for _ in range(6))
        self.outlet = nn.Linear(6, 4)

    def training_step(self, batch, batch_idx):
        images, classes = batch
        x = self.inlet(images)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.outlet(x.mean((2, 3))), classes)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)

    @staticmethod
    def batches():
        return [(torch.randn(BATCH, 3, 5, 5), torch.randint(4, (BATCH,))) for _ in range(STEPS)]


class T5(LightningModule):
    """With its own dropout, tied embeddings, and a cache of keys and values that nobody switched off."""

    def __init__(self):
        super().__init__()
        config = T5Config(
            vocab_size=24, d_model=16, d_kv=8, d_ff=32, num_layers=3, num_heads=2, decoder_start_token_id=0
        )
        self.model = T5ForConditionalGeneration(config)

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch[:, :LENGTH], labels=batch[:, LENGTH:].contiguous()).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)

    @staticmethod
    def batches():
        return list(torch.randint(1, 24, (STEPS, BATCH, LENGTH + 5)))


class Experts(GPT):
    """Blocks with experts, which ZeRO gathers apart from their block."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(moe.MoEBlock(16, 2, num_experts=4, top_k=2) for _ in range(3))


def narrow(network):
    """One of the examples' networks, narrower still."""

    class Narrow(network):
        def __init__(self):
            super().__init__(shrink=16)

        def batches(self):
            images, classes = networks.pictures(STEPS * BATCH, self.size).tensors
            return list(zip(images.split(BATCH), classes.split(BATCH), strict=True))

    return Narrow


MODELS = {model.__name__: model for model in (GPT, ResNet, T5)}
NETWORKS = {name: narrow(network) for name, network in networks.NETWORKS.items()}
OTHERS = {"Experts": Experts}


class Bits(Callback):
    """A digest of each step's gradients on this rank, and at the end of weights and buffers."""

    def __init__(self):
        self.gradients, self.weights = [], ""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        named = [(name, p.grad) for name, p in pl_module.named_parameters() if p.grad is not None]
        assert named
        self.gradients.append(digest(named))

    def on_train_end(self, trainer, pl_module):
        self.weights = digest([*pl_module.named_parameters(), *pl_module.named_buffers()])


def digest(named):
    found = hashlib.sha256()
    for name, tensor in named:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found.update(f"{name} {list(local.shape)}".encode())
        found.update(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def bits(model, callbacks=(), strategy="auto", **options):
    """What a fit leaves, bit by bit: gradients of each step, weights and buffers, the streams of random numbers."""
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    module = (MODELS | OTHERS)[model]() if isinstance(model, str) else model()
    watch = Bits()
    data = DataLoader(module.batches(), batch_size=None)
    trainer_of(strategy, callbacks=[*callbacks, watch], limit_val_batches=0, **options).fit(module, data)
    return watch.gradients, watch.weights, torch.rand(()).item(), random.random(), numpy.random.random()
