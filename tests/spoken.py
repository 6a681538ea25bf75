"""A small language model with everything that Lightning calls, for tests of the tensor axis."""

import warnings

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.parity_attention import Fused, FusedBlock
from tests.small import hybrid

WORDS, WIDTH, DEPTH, HEADS, LENGTH = 25, 16, 4, 4, 6


class Recomputing(FusedBlock):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Spoken(LightningModule):
    """Logs its loss and torchmetrics' accuracy of the logits."""

    block = FusedBlock

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.model = Fused(WORDS, WIDTH, DEPTH, HEADS, LENGTH)
        for block in self.model.transformer["h"]:
            block.__class__ = self.block
        names = "train_accuracy", "val_accuracy", "test_accuracy"
        self.metrics = nn.ModuleDict({name: MulticlassAccuracy(WORDS, average="micro") for name in names})

    def forward(self, text):
        return self.model(text)

    def loss(self, text, name):
        logits, labels = self(text[:, :-1]), text[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        accuracy = self.metrics[f"{name}_accuracy"]
        accuracy(logits.argmax(-1), labels)
        self.log_dict({f"{name}_loss": loss, f"{name}_accuracy": accuracy}, on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self.loss(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.loss(batch, "val")

    def test_step(self, batch, batch_idx):
        self.loss(batch, "test")

    def predict_step(self, batch, batch_idx):
        return self(batch[:, :-1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2, eps=1e-3)


class Checkpointed(Spoken):
    block = Recomputing


class OfTransformers(Spoken):
    """A causal model of transformers instead."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.model = self.make()

    @staticmethod
    def make() -> nn.Module:
        raise NotImplementedError

    def forward(self, text):
        return self.model(input_ids=text, use_cache=False).logits


class Llama(OfTransformers):
    @staticmethod
    def make():
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=WORDS,
                hidden_size=WIDTH,
                intermediate_size=2 * WIDTH,
                num_hidden_layers=DEPTH,
                num_attention_heads=HEADS,
                num_key_value_heads=2,
                max_position_embeddings=32,
                bos_token_id=0,
                eos_token_id=None,
                pad_token_id=0,
            )
        )


class CheckpointedLlama(Llama):
    @staticmethod
    def make():
        model = Llama.make()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".gradient_checkpointing_enable", category=FutureWarning)
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model


class GPT2(OfTransformers):
    @staticmethod
    def make():
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        sizes = {"vocab_size": WORDS, "n_positions": 32, "n_embd": WIDTH, "n_layer": DEPTH, "n_head": HEADS}
        model = GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=None, pad_token_id=0))
        nn.init.normal_(model.transformer.wte.weight, std=0.5)  # else the most likely words are a matter of rounding
        return model


def texts(number, batch_size=4, seed=0):
    data = torch.randint(1, WORDS, (number, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return DataLoader(list(data), batch_size)


def split(pipeline=1, tensor=2, microbatches=2, **options):
    """A strategy with a tensor axis."""
    return hybrid(pipeline, 1, microbatches, tensor_parallel_size=tensor, **options)
