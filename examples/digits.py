"""Scikit-learn's handwritten digits, and a small residual network that reads them: plain Lightning.

The 1,797 images of 8 x 8 pixels come with the package: nothing is downloaded.
"""

from collections.abc import Iterator
from functools import cache, partial

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, default_convert

from examples.networks import Residual

NUM_CLASSES = 10
PARTS = {"train": 1280, "validation": 157, "test": 360}
PARTS_KEPT = tuple(PARTS)[1:]
USUAL_BATCH = 32  # for which the batch norms' usual memory is meant


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Images and their classes, of which a batch is taken at once.

    Args:
        images: Brightness, float32 ``[number, 1, 8, 8]``.
        classes: int64 ``[number]``.
    """

    def __init__(self, images: Tensor, classes: Tensor) -> None:
        self.images, self.classes = images, classes

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.classes[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.images[indices], self.classes[indices]


class Shuffled(Sampler[int]):
    """Several epochs as one, each in an order of its own: every batch is full, though epochs do not divide by it.

    Args:
        size: Number of images.
        epochs: How often each comes.
        seed: Of the orders.
    """

    def __init__(self, size: int, epochs: int, seed: int) -> None:
        self.size, self.epochs, self.seed = size, epochs, seed

    def __len__(self) -> int:
        return self.size * self.epochs

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.epochs):
            yield from torch.randperm(self.size, generator=generator).tolist()


class Digits(LightningDataModule):
    """Handwritten digits: 1,280 to train on, 157 to choose rates by, and 360 to test; each part has all classes alike.

    What is called an epoch by the Trainer is all epochs, with one validation at its end, of both other parts.

    Args:
        batch_size: Images of a step, over all replicas.
        epochs: How often each image comes.
        seed: Of the order; the parts are always the same.
    """

    def __init__(self, batch_size: int = 32, epochs: int = 20, seed: int = 0) -> None:
        super().__init__()
        self.batch_size, self.epochs, self.seed = batch_size, epochs, seed

    def setup(self, stage: str) -> None:
        self.parts = parts()

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        assert self.trainer is not None
        replicas = (self.trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        train = self.parts["train"]
        order = Shuffled(len(train), self.epochs, self.seed)
        return DataLoader(train, self.batch_size // replicas, sampler=order, collate_fn=default_convert)

    def val_dataloader(self) -> list[DataLoader[tuple[Tensor, Tensor]]]:
        return [DataLoader(self.parts[name], 512, collate_fn=default_convert) for name in PARTS_KEPT]


@cache
def parts() -> dict[str, Images]:
    """Read the digits, and deal them out.

    Raises:
        SystemExit: If scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise SystemExit('The digits come with scikit-learn: pip install "scikit-learn>=1.5"') from error
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 8 - 1  # from 0 to 16
    classes = torch.tensor(found.target)
    split = partial(train_test_split, random_state=0)
    kept, test = split(range(len(images)), test_size=PARTS["test"], stratify=classes)
    train, validation = split(kept, train_size=PARTS["train"], stratify=classes[kept])
    images = images.contiguous(memory_format=torch.channels_last)
    places = {"train": train, "validation": validation, "test": test}
    return {name: Images(images[chosen], classes[chosen]) for name, chosen in places.items()}


class DigitsNet(LightningModule):
    """A stem, three residual blocks and a linear head.

    The averages of batch norms go over as many images as usual at a batch of 32, whatever the batch: else a few large
    steps would leave them behind.

    Args:
        width: Channels of the first block.
        batch_size: Images of a step.
    """

    def __init__(self, width: int = 12, batch_size: int = 32) -> None:
        super().__init__()
        stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        blocks = [Residual(width, width), Residual(width, 2 * width), Residual(2 * width, 4 * width)]
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, NUM_CLASSES))
        self.blocks = nn.Sequential(stem, *blocks, head)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 1 - 0.9 ** (batch_size / USUAL_BATCH)
            if isinstance(module, Residual):
                nn.init.zeros_(module.norm2.weight)  # a new block is its skip (Goyal et al. 2017, section 5.1)
        self.to(memory_format=torch.channels_last)  # much faster on CPUs

    def forward(self, images: Tensor) -> Tensor:
        """Give the scores, ``[batch, 10]``, of ``images``, ``[batch, 1, 8, 8]``."""
        return self.blocks(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, classes = batch
        return F.cross_entropy(self(images), classes)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        images, classes = batch
        scores, part = self(images), PARTS_KEPT[dataloader_idx]
        found = {f"{part}/loss": F.cross_entropy(scores, classes)}
        found[f"{part}/accuracy"] = (scores.argmax(1) == classes).float().mean()
        self.log_dict(found, add_dataloader_idx=False, batch_size=len(classes), sync_dist=True)
