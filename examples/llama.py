"""A byte-level Llama of transformers with random weights, on the text of Python's own standard library.

``lightning-hybrid fit --config examples/llama_3d.yaml`` trains it over four processes, ``python -m examples.llama`` in
one. Nothing is downloaded.
"""

import math

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from examples.gpt import StandardLibrary


class Llama(LightningModule):
    """Predict each byte from those before it.

    Args:
        width: Features of a byte, a multiple of ``heads``.
        depth: Number of layers.
        heads: Query heads of a layer.
        key_value_heads: Heads of keys and values, each shared by equally many query heads.
        context: Most bytes that the model sees at once.
        learning_rate: Of AdamW.
    """

    def __init__(
        self,
        width: int = 96,
        depth: int = 8,
        heads: int = 8,
        key_value_heads: int = 4,
        context: int = 128,
        learning_rate: float = 3e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256,
                hidden_size=width,
                intermediate_size=8 * width // 3,
                num_hidden_layers=depth,
                num_attention_heads=heads,
                num_key_value_heads=key_value_heads,
                max_position_embeddings=context,
            )
        )

    def forward(self, text: Tensor) -> Tensor:
        """Give the logits of each next byte, ``[batch, length, 256]``, for ``text`` int64 ``[batch, length]``."""
        return self.model(input_ids=text, use_cache=False).logits

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch, "train")

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch, "val")

    def loss(self, batch: Tensor, name: str) -> Tensor:
        loss = F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log(f"{name}/bits_per_byte", loss / math.log(2), prog_bar=True, sync_dist=name == "val")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.hparams["learning_rate"], (0.9, 0.95), weight_decay=0.1)


if __name__ == "__main__":
    seed_everything(0)
    trainer = Trainer(accelerator="cpu", max_steps=500, val_check_interval=125, gradient_clip_val=1.0)
    trainer.fit(Llama(), StandardLibrary())
