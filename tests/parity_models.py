"""Small models of eleven kinds, each a plain LightningModule.

In a weighted case some samples count more than others: they have more labels, or a weight; the model's step returns the
total as ``loss_weight``.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from examples.gpt import GPT
from tests.parity_attention import Attentive, Fused

WIDTH, DEPTH, HEADS, WORDS, CLASSES, LENGTH = 16, 5, 4, 24, 5, 7
FEATURES = 12
ABSENT = -100
SIDE = 16  # of an image: 16 patches and the class token make an odd sequence

Batch = dict[str, Tensor]


class Task(LightningModule):
    """A model with its loss. Weight matrices decay, and the rest does not."""

    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.weighted = weighted

    def result(self, loss: Tensor, weight: Tensor | int) -> Any:
        weight = int(weight)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=weight if self.weighted else None)
        return {"loss": loss, "loss_weight": weight} if self.weighted else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        decayed = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in self.parameters() if parameter.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)  # a large eps: wrongly scaled gradients show


class LanguageModel(Task):
    """A causal transformers model; the loss is here because theirs is computed in float32."""

    def __init__(self, model: nn.Module, weighted: bool) -> None:
        super().__init__(weighted)
        self.model = model

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        labels = batch["labels"]
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return self.result(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), (labels != ABSENT).sum())


class Translator(Task):
    """An encoder-decoder of transformers with its own loss."""

    def __init__(self, model: nn.Module, weighted: bool) -> None:
        super().__init__(weighted)
        self.model = model

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.result(self.model(**batch).loss, (batch["labels"] != ABSENT).sum())


class Classifier(Task):
    """Something that gives the logits of one label a sample."""

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        losses = F.cross_entropy(self(batch["x"]), batch["y"], reduction="none")
        return self.result((losses * batch["weight"]).sum() / batch["weight"].sum(), batch["weight"].sum())


class Images(Classifier):
    """A vision transformer of transformers."""

    def __init__(self, weighted: bool) -> None:
        super().__init__(weighted)
        self.model = ViTForImageClassification(
            ViTConfig(
                image_size=SIDE,
                patch_size=4,
                hidden_size=WIDTH,
                intermediate_size=2 * WIDTH,
                num_hidden_layers=DEPTH,
                num_attention_heads=HEADS,
                num_labels=CLASSES,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.model(pixel_values=x).logits


class Perceptron(Classifier):
    """One flat ``nn.Sequential``, half of whose elements have no parameters."""

    def __init__(self, weighted: bool) -> None:
        super().__init__(weighted)
        widths = [FEATURES] + [WIDTH] * DEPTH
        hidden = [layer for sizes in pairwise(widths) for layer in (nn.Linear(*sizes), nn.Tanh())]
        self.layers = nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Skips(Classifier):
    """The skip connections are outside the blocks."""

    def __init__(self, weighted: bool) -> None:
        super().__init__(weighted)
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(DEPTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class InPlace(Classifier):
    """Writes into what goes into the blocks and into what comes out of them."""

    def __init__(self, weighted: bool) -> None:
        super().__init__(weighted)
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.shift = nn.Parameter(torch.randn(WIDTH) / 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
            for _ in range(DEPTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x += self.shift
        x[:, : WIDTH // 2].mul_(2)
        for block in self.blocks:
            y = block(x)
            y += x
            y[:, 1:3].add_(0.5)
            y.mul_(0.9)
            x = y
        return self.head(F.relu_(x))


class Tagger(Task):
    """``nn.TransformerEncoder`` under two masks."""

    def __init__(self, weighted: bool) -> None:
        super().__init__(weighted)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.encoder = nn.TransformerEncoder(layer, DEPTH)
        for weight in (p for p in self.encoder.parameters() if p.ndim > 1):
            nn.init.xavier_uniform_(weight)  # the layers are copies of one

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        labels = batch["labels"]
        causal = nn.Transformer.generate_square_subsequent_mask(labels.shape[1], dtype=torch.bool)
        x = self.encoder(self.embed(batch["input_ids"]), causal, batch["attention_mask"] == 0)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=ABSENT)
        return self.result(loss, (labels != ABSENT).sum())


class Speaker(Task):
    """A hand-written causal model."""

    def __init__(self, model: nn.Module, weighted: bool) -> None:
        super().__init__(weighted)
        self.model = model

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        labels = batch["labels"]
        loss = F.cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), labels.flatten(), ignore_index=ABSENT)
        return self.result(loss, (labels != ABSENT).sum())


class WeightedGPT(GPT):
    """The example, with bytes of 0 for padding."""

    def loss(self, batch: Tensor, name: str) -> Any:
        labels = batch[:, 1:].flatten()
        weight = int((labels != 0).sum())
        loss = F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), labels, ignore_index=0)
        self.log(f"{name}/nats", loss, batch_size=weight)
        return {"loss": loss, "loss_weight": weight}


def llama(weighted: bool) -> LightningModule:
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=2 * HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=16,
    )
    return LanguageModel(in_full_precision(LlamaForCausalLM(config)), weighted)


def gpt2(weighted: bool) -> LightningModule:
    config = GPT2Config(
        vocab_size=WORDS + 1,  # no multiple of a number of ranks
        n_positions=16,
        n_embd=WIDTH,
        n_layer=DEPTH,
        n_head=HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LanguageModel(GPT2LMHeadModel(config), weighted)


def t5(weighted: bool) -> LightningModule:
    config = T5Config(
        vocab_size=WORDS,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=2 * WIDTH,
        num_layers=(DEPTH + 1) // 2,
        num_heads=HEADS,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return Translator(in_full_precision(T5ForConditionalGeneration(config)), weighted)


def attention(weighted: bool) -> LightningModule:
    return Speaker(Attentive(WORDS, WIDTH, DEPTH, HEADS, LENGTH), weighted)


def fused(weighted: bool) -> LightningModule:
    return Speaker(Fused(WORDS + 1, WIDTH, DEPTH, HEADS, LENGTH), weighted)


def example(weighted: bool) -> LightningModule:
    return (WeightedGPT if weighted else GPT)(width=WIDTH, depth=DEPTH, heads=HEADS, context=LENGTH, learning_rate=1e-2)


def in_full_precision(model: nn.Module) -> nn.Module:
    """Replace the norms that compute in float32 whatever they are given by torch's."""
    for name, norm in list(model.named_modules()):
        if type(norm).__name__ in ("LlamaRMSNorm", "T5LayerNorm"):
            same = nn.RMSNorm(WIDTH, eps=norm.variance_epsilon)
            same.weight = norm.weight
            model.set_submodule(name, same)
    return model


MODELS: dict[str, Callable[[bool], LightningModule]] = {
    "mlp": Perceptron,
    "skips": Skips,
    "in-place": InPlace,
    "encoder": Tagger,
    "example": example,
    "gpt2": gpt2,
    "llama": llama,
    "vit": Images,
    "t5": t5,
    "attention": attention,
    "fused": fused,
}


def make(model: str, weighted: bool) -> LightningModule:
    torch.manual_seed(1)
    return MODELS[model](weighted)
