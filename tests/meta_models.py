"""LightningModules that are built on the meta device: with what initialisers have to deal with."""

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from tests.parity_models import in_full_precision

WORDS, WIDTH, LENGTH, DEPTH = 12, 8, 5, 4


class Block(nn.Module):
    """Attention of torch's own, whose method that initialises is private."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        y = self.norm(x)
        return x + self.mlp(x + self.attention(y, y, y, need_weights=False)[0])


class Meta(LightningModule):
    """Next words. `real` builds it on the CPU."""

    rate = 0.02

    def __init__(self, real=False):
        super().__init__()
        torch.manual_seed(3)
        self.real = real

    def configure_model(self):
        if not self.built():
            with torch.device("cpu" if self.real else "meta"):
                self.build()
            self.double()

    def built(self):
        return hasattr(self, "blocks")

    def build(self):
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, words):
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, words):
        return F.cross_entropy(self(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())

    def training_step(self, batch, batch_idx):
        return self.loss(batch[0])

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch[0]))

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, self.rate, eps=1e-3)


class Tied(Meta):
    """One weight for embedding and head, positions of the module itself, and an initialiser for the whole model."""

    def build(self):
        super().build()
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embed.weight
        self.position = nn.Parameter(torch.empty(LENGTH, WIDTH))
        self.register_buffer("scale", torch.empty(1), persistent=False)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif module is self:
            nn.init.normal_(self.position, std=0.5)
            nn.init.constant_(self.scale, 2.0)

    def forward(self, words):
        x = self.embed(words) + self.position[: words.shape[1]] * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class NormBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Norms(Meta):
    """Buffers in the blocks."""

    def build(self):
        super().build()
        self.blocks = nn.ModuleList(NormBlock() for _ in range(DEPTH))


class Llama(Meta):
    """A model of transformers."""

    def build(self):
        config = LlamaConfig(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=DEPTH,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.model = in_full_precision(LlamaForCausalLM(config))

    def built(self):
        return hasattr(self, "model")

    def forward(self, words):
        return self.model(input_ids=words).logits


def words(number):
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randint(WORDS, (number, LENGTH + 1), generator=generator))


def word_loader(number, batch_size, data=1, rank=0):
    dataset = words(number)
    share = DistributedSampler(dataset, data, rank, shuffle=False) if data > 1 else None
    return DataLoader(dataset, batch_size // data, sampler=share)


class Recurrent(nn.Module):
    """`nn.LSTM` keeps its weights in a list besides."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return x + self.lstm(x)[0]


class Recurrences(Meta):
    """Its validation differentiates, and it asks its weights where they are."""

    def build(self):
        super().build()
        self.blocks = nn.ModuleList([Block(), Recurrent(), Block(), Recurrent()])

    def validation_step(self, batch, batch_idx):
        assert self.blocks[0].norm.weight.device.type == "cpu"
        with torch.enable_grad():
            x = self.embed(batch[0]).clone().requires_grad_()
            y = x
            for block in self.blocks:
                y = block(y)
            (slope,) = torch.autograd.grad(y.square().sum(), x)
        self.log("val", slope.square().mean())


class Compiled(Meta):
    """A part of each block is compiled in place."""

    def build(self):
        super().build()
        for block in self.blocks:
            block.mlp.compile(backend="eager")


class Body(nn.Module):
    """Initialises the blocks that it contains."""

    def __init__(self):
        super().__init__()
        self.layers, self.norm = nn.ModuleList(Block() for _ in range(DEPTH)), nn.LayerNorm(WIDTH)

    def _reset_parameters(self):
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Around(Meta):
    def built(self):
        return hasattr(self, "body")

    def build(self):
        self.embed, self.head, self.body = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS), Body()

    def forward(self, words):
        return self.head(self.body(self.embed(words)))


class Rotation(nn.Module):
    """A table and a matrix."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.empty(WIDTH))

    def reset_parameters(self):
        self.table.copy_(torch.arange(float(WIDTH)) / WIDTH)

    def forward(self, x):
        return self.linear(x + self.table)


class SharingBlock(Block):
    def __init__(self, shared):
        super().__init__()
        self.shared = shared

    def forward(self, x):
        return super().forward(x) + self.shared(x)


class SharedModule(Meta):
    """All blocks have one module in common."""

    def build(self):
        super().build()
        shared = Rotation()
        self.blocks = nn.ModuleList(SharingBlock(shared) for _ in range(DEPTH))


class Manual(Meta):
    """Takes its own steps."""

    def __init__(self, real=False):
        super().__init__(real)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch[0]))
        optimizer.step()


class Shared(Meta):
    """Blocks share weights."""

    def build(self):
        super().build()
        self.blocks[3].mlp[0].weight = self.blocks[0].mlp[0].weight
        self.blocks[2].norm.weight = self.blocks[1].norm.weight
