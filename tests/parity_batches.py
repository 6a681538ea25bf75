"""Batches for the models of the parity table, and what they weigh."""

from typing import Any

import torch
from torch import Tensor

from tests.parity_models import ABSENT, CLASSES, FEATURES, LENGTH, SIDE, WORDS


def make_batch(model: str, weighted: bool, size: int, seed: int) -> Any:
    """A batch of that many samples, the same for the same arguments."""
    random = torch.Generator().manual_seed(seed)
    if model in ("mlp", "skips", "in-place", "vit"):
        shape = (3, SIDE, SIDE) if model == "vit" else (FEATURES,)
        weight = torch.randint(1, 9, (size,), generator=random) if weighted else torch.ones(size, dtype=torch.int64)
        y = torch.randint(CLASSES, (size,), generator=random)
        return {"x": torch.randn(size, *shape, generator=random), "y": y, "weight": weight}
    lengths = torch.randint(2, LENGTH + 1, (size,), generator=random) if weighted else torch.full((size,), LENGTH)
    here = torch.arange(LENGTH) < lengths[:, None]
    if model == "example":
        text = torch.randint(1, 256, (size, LENGTH + 1), generator=random)
        return torch.cat([text[:, :1], text[:, 1:] * here], dim=1)
    words = torch.randint(1, WORDS, (2, size, LENGTH), generator=random)
    labels = torch.where(here, words[1], ABSENT)
    if model == "t5":
        labels = labels[:, :-2].clone()
    return {"input_ids": words[0], "attention_mask": here.long(), "labels": labels}


def weight_of(batch: Any) -> int:
    """What the step of a weighted model returns for the batch."""
    if isinstance(batch, Tensor):
        return int((batch[:, 1:] != 0).sum())
    return int(batch["weight"].sum() if "weight" in batch else (batch["labels"] != ABSENT).sum())
