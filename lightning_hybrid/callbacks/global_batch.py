"""How many samples, or tokens, one step of the optimizer has over all replicas."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from lightning_hybrid.functional.trees import leaves_of
from lightning_hybrid.parallel.pipeline.microbatch import batch_size, check_visible


def num_replicas(trainer: Trainer) -> int:
    """Ranks with batches of their own; a pipeline's and a tensor axis's ranks share one."""
    kwargs: dict[str, Any] = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return int(kwargs.get("num_replicas", 1))


def over_replicas(trainer: Trainer, *counts: int) -> list[int]:
    """Sums of whole numbers over the replicas; all ranks call it together.

    `Strategy.reduce` may reduce over more ranks than replicas: the world, with ranks that share a batch. So 1 is
    summed too.
    """
    numbers = torch.tensor([*counts, 1], dtype=torch.int64, device=trainer.strategy.root_device)
    *sums, ranks = trainer.strategy.reduce(numbers, reduce_op="sum").tolist()
    return [total * num_replicas(trainer) // ranks for total in sums]


def loader_batch_size(trainer: Trainer, name: str) -> int | None:
    """Samples of a replica's batch as the training loader says; None if it does not.

    Args:
        trainer: From `on_train_start` on.
        name: Of the callback that asks.

    Raises:
        ValueError: If there are several loaders.
    """
    loaders = CombinedLoader(trainer.train_dataloader, "sequential").flattened
    if len(loaders) != 1:
        raise ValueError(
            f"A step has batches of {len(loaders)} loaders, of which {name} cannot know what counts as the batch size. "
            "Join them into one loader, or set the learning rate by hand and leave the callback out."
        )
    size = getattr(loaders[0], "batch_size", None)
    size = size if size is not None else getattr(getattr(loaders[0], "batch_sampler", None), "batch_size", None)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        return None
    try:
        return min(size, len(loaders[0].sampler))
    except (AttributeError, TypeError):  # of an IterableDataset
        return size


def loader_batch_of_all(trainer: Trainer, name: str) -> int:
    """Samples of a loader batch over all replicas; all ranks call it together.

    Args:
        trainer: From `on_train_start` on.
        name: Of the callback that asks.

    Raises:
        ValueError: If there are several loaders, or the loader does not say.
    """
    size = loader_batch_size(trainer, name)
    known, total = over_replicas(trainer, int(size is not None), size or 0)
    if known < num_replicas(trainer):
        raise ValueError(
            f"The training loader does not say how many samples a batch has, so that {name} cannot know what grows. "
            "Give the DataLoader, or its batch sampler, a batch_size."
        )
    return total


def dataset_size(trainer: Trainer) -> int | None:
    """Samples of the one training loader's data set; None if it has no length."""
    dataset: Any = getattr(CombinedLoader(trainer.train_dataloader, "sequential").flattened[0], "dataset", None)
    return len(dataset) if hasattr(dataset, "__len__") else None


def count_samples(batch: Any) -> int:
    """Samples of one replica's batch.

    Raises:
        TypeError: If no tensor can be seen in it.
    """
    check_visible(batch)
    return batch_size(batch)


def count_tokens(batch: Any) -> int:
    """Elements of the first tensor of whole numbers, padding too.

    Raises:
        ValueError: If there is none.
    """
    found = (leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor) and leaf.ndim and _is_whole(leaf))
    first = next(found, None)
    if first is None:
        raise ValueError(
            "The batch has no tensor of whole numbers whose elements could be counted as tokens. Count samples "
            "(unit='samples')."
        )
    return first.numel()


def _is_whole(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool
