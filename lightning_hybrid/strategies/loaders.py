"""Data of one replica: the same on all its ranks; in evaluation seen once, without padding by duplicates."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_hybrid.compat import all_gather_flat
from lightning_hybrid.functional.trees import leaves_of
from lightning_hybrid.parallel.mesh import Mesh
from lightning_hybrid.parallel.streams import derived_seed


def remove_padding(sampler: object) -> None:
    """Let a `DistributedSampler` give each sample to exactly one replica, some of which then have one fewer."""
    if isinstance(sampler, DistributedSampler) and not sampler.drop_last:
        length = len(sampler.dataset)  # type: ignore[arg-type]
        sampler.total_size = length
        sampler.num_samples = len(range(sampler.rank, length, sampler.num_replicas))


class EvenLoader:
    """A loader that yields equally many batches on every replica; surplus ones repeat a batch and must not count.

    Attributes that it does not have are the wrapped loader's.

    Args:
        loader: The replica's own loader.
        mesh: Groups of this rank. All ranks make and iterate the loader together.

    Attributes:
        num_real: Batches of the current iteration that came from the loader.
    """

    def __init__(self, loader: Any, mesh: Mesh) -> None:
        self._loader, self._mesh = loader, mesh
        self.num_real = 0
        self._length = self._longest()

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not there yet, while being unpickled
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"{type(self._loader).__name__} has no length on some replica.")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        self.num_real = 0
        batches, batch, num_yielded = iter(self._loader), None, 0
        while self._length is None or num_yielded < self._length:
            following = next(batches, _END)
            here = self._replicas_with(following is not _END) if self._length is None or num_yielded == 0 else [0]
            if not here:
                return
            if following is not _END:
                self.num_real += 1
                batch = following
            else:
                self._note_surplus()
            if num_yielded == 0 and len(here) < self._mesh.layout.data:
                batch = self._lend(batch, source=self._mesh.data_ranks[here[0]])
            num_yielded += 1
            yield batch

    def _note_surplus(self) -> None:
        """Lightning looks up which samples of the dataset each batch has: a surplus one has none."""
        seen = getattr(getattr(self._loader, "batch_sampler", None), "seen_batch_indices", None)
        if seen is not None:
            seen.append([])

    def _longest(self) -> int | None:
        try:
            length = len(self._loader)
        except (TypeError, NotImplementedError):
            length = -1
        lengths = self._gather(length)
        return None if min(lengths) < 0 else max(lengths)

    def _replicas_with(self, here: bool) -> list[int]:
        return [rank for rank, other in enumerate(self._gather(int(here))) if other]

    def _gather(self, number: int) -> list[int]:
        gathered = torch.empty(self._mesh.layout.data, dtype=torch.int64, device=self._mesh.device)
        mine = torch.tensor([number], device=self._mesh.device)
        all_gather_flat(gathered, mine, self._mesh.data_group)
        numbers: list[int] = gathered.tolist()
        return numbers

    def _lend(self, batch: Any, *, source: int) -> Any:
        """A replica without a single sample runs the user's hooks on another one's batch."""
        box = [batch]
        dist.broadcast_object_list(box, src=source, group=self._mesh.data_group)
        return batch if self.num_real else box[0]


def own_generators(loader: object) -> list[torch.Generator]:
    """Generators that the user gave to a loader and its sampler, each once."""
    found = [getattr(part, "generator", None) for part in (loader, getattr(loader, "sampler", None))]
    return list({id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values())


def agree_on_order(loader: object, seed: int, *, epoch: int) -> None:
    """Let samplers and workers of a `DataLoader` draw alike on all ranks of a replica, from the seed and the epoch.

    Args:
        loader: Anything else than a `DataLoader` is left alone.
        seed: Equal on all of them.
        epoch: The one that is about to begin; `set_epoch` of the sampler, which Lightning calls, tells of later ones.
    """
    if not isinstance(loader, DataLoader):
        return
    generators, sampler = [], loader.sampler
    if loader.generator is None:
        loader.generator = torch.Generator()
        generators.append(loader.generator)
    if isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler) and sampler.generator is None:
        sampler.generator = torch.Generator()
        generators.append(sampler.generator)
    own = getattr(sampler, "set_epoch", None)

    def set_epoch(epoch: int) -> None:
        for generator in generators:
            generator.manual_seed(derived_seed(seed, epoch))
        if own is not None:
            own(epoch)

    set_epoch(epoch)
    if isinstance(sampler, Sampler):  # else the user's own iterable, which Lightning tells nothing
        vars(sampler)["set_epoch"] = set_epoch


def seed_workers(loader: object, data_rank: int) -> None:
    """Let `seed_everything(workers=True)` seed workers by the replica; Lightning would seed them by the process."""
    if isinstance(loader, DataLoader) and loader.worker_init_fn is None and os.environ.get("PL_SEED_WORKERS") == "1":
        loader.worker_init_fn = partial(pl_worker_init_function, rank=data_rank)


def fingerprint(batch: object) -> str:
    """A hash of the tensors of a batch: their shapes, types and bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for leaf in leaves_of(batch):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            digest.update(repr((tuple(leaf.shape), leaf.dtype)).encode())
            digest.update(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_same_batch(batch: object, mesh: Mesh) -> None:
    """Compare a batch over the stages of a replica, and over the tensor axis.

    Raises:
        RuntimeError: On every rank of the replica, if two of them were given different batches.
    """
    layout = mesh.layout
    stages: list[Any] = [None] * layout.pipeline
    dist.all_gather_object(stages, fingerprint(batch), group=mesh.pipeline_group)
    columns: list[Any] = [stages]
    if layout.tensor > 1:
        columns = [None] * layout.tensor
        dist.all_gather_object(columns, stages, group=mesh.tensor_group)
    if len({each for column in columns for each in column}) > 1:
        ranks = [layout.rank(p, mesh.data_rank, t) for p in range(layout.pipeline) for t in range(layout.tensor)]
        raise RuntimeError(
            f"The ranks {ranks} of one model replica were given different batches, so that inputs and "
            "labels would come from different samples. Every rank of it must draw the same samples: call "
            "seed_everything(..., workers=True), draw random numbers in the dataset or sampler from a seed of their "
            "own, and split data by the data-parallel rank (trainer.distributed_sampler_kwargs), not by the global "
            "rank."
        )


_END = object()
