"""A byte-level GPT and the text of Python's own standard library: plain Lightning, one process or many.

``python examples/gpt.py`` trains it in one process. Nothing is downloaded.
"""

import hashlib
import math
import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Block(nn.Module):
    """Causal attention and a two-layer perceptron, each with a norm before and a skip around."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        for layer in (self.out, self.shrink):  # small: a new block is almost the identity
            nn.init.normal_(layer.weight, std=0.005)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm2(x))

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.shrink(F.gelu(self.grow(x)))


class GPT(LightningModule):
    """Predict each byte from those before it.

    Args:
        width: Features of a byte, a multiple of ``heads``.
        depth: Number of blocks.
        heads: Attention heads of a block.
        context: Most bytes that the model sees at once.
        tie_weights: Let the head use the embedding's weights.
        learning_rate: Peak of the schedule: linear warm-up, then half a cosine down to a tenth.
        warmup: Share of all steps that warm up.
    """

    def __init__(
        self,
        width: int = 96,
        depth: int = 8,
        heads: int = 4,
        context: int = 128,
        tie_weights: bool = False,
        learning_rate: float = 3e-3,
        warmup: float = 0.05,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for weight, std in ((self.embed.weight, 0.5), (self.position.weight, 0.1), (self.head.weight, 0.005)):
            nn.init.normal_(weight, std=std)
        if tie_weights:
            self.head.weight = self.embed.weight

    def forward(self, text: Tensor) -> Tensor:
        """Give the logits of each next byte, ``[batch, length, 256]``, for ``text`` int64 ``[batch, length]``."""
        x = self.embed(text) + self.position.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch, "train")

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch, "val")

    def loss(self, batch: Tensor, name: str) -> Tensor:
        loss = F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log(f"{name}/bits_per_byte", loss / math.log(2), prog_bar=True, sync_dist=name == "val")
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), self.hparams["learning_rate"], (0.9, 0.95), weight_decay=0.1)
        steps = self.trainer.estimated_stepping_batches
        warmup = max(1.0, steps * self.hparams["warmup"])

        def rate(step: int) -> float:
            return min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / steps)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def generate(self, prompt: str, length: int = 200, temperature: float = 0.7) -> str:
        """Continue ``prompt`` by ``length`` sampled bytes."""
        text = torch.tensor([list(prompt.encode())], device=self.device)
        for _ in range(length):
            logits = self(text[:, -self.hparams["context"] :])[:, -1] / temperature
            text = torch.cat([text, logits.softmax(dim=-1).multinomial(1)], dim=1)
        return bytes(text[0].tolist()).decode(errors="replace")


class Windows(Dataset[Tensor]):
    """Equal pieces of a text, ``context + 1`` bytes each: the next piece begins with the last byte of this one.

    Args:
        text: All bytes, uint8 ``[length]``.
        context: Bytes that a model predicts from a piece.
        limit: Use that many pieces, spread over the text; None: all.
    """

    def __init__(self, text: Tensor, context: int, limit: int | None = None) -> None:
        self.text, self.context = text, context
        number = (len(text) - 1) // context
        self.stride = max(1, number // limit) if limit else 1
        self.number = min(number, limit) if limit else number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> Tensor:
        start = range(self.number)[index] * self.stride * self.context  # an index too high ends an iteration
        return self.text[start : start + self.context + 1].long()


class StandardLibrary(LightningDataModule):
    """The Python files of the running interpreter's standard library; one file in twenty is held out.

    Args:
        batch_size: Pieces a step and process; under data parallelism, a step and replica.
        context: Bytes a piece.
        validation_pieces: Held-out pieces that a validation looks at.
    """

    def __init__(self, batch_size: int = 16, context: int = 128, validation_pieces: int = 256) -> None:
        super().__init__()
        self.batch_size, self.context, self.validation_pieces = batch_size, context, validation_pieces

    def setup(self, stage: str) -> None:
        train, held_out = split(library_files())
        self.train = Windows(read(train), self.context)
        self.held_out = Windows(read(held_out), self.context, self.validation_pieces)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.held_out, self.batch_size)


def library_files() -> list[Path]:
    """List the library's sources in a fixed order, without tests, tables and what others installed beside it."""
    root, files = Path(sysconfig.get_paths()["stdlib"]), list[Path]()
    left_out = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith("config-")]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if len(files) < 100:
        raise RuntimeError(f"{root} holds {len(files)} Python files. Use a Python that has its library as files there.")
    return sorted(files)


def split(files: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Part the files into training and held-out ones by their names alone: each always stays on its side."""
    sides: tuple[list[Path], list[Path]] = [], []
    for file in files:
        digest = hashlib.sha256("/".join(file.parts[-2:]).encode()).digest()
        sides[digest[0] % 20 == 0].append(file)
    return sides


def read(files: Iterable[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)


if __name__ == "__main__":
    seed_everything(0)
    trainer = Trainer(accelerator="cpu", max_steps=500, val_check_interval=125, gradient_clip_val=1.0)
    trainer.fit(GPT(), StandardLibrary())
