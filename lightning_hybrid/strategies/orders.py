"""Samplers that go through a dataset in one order, however many replicas share it, and from any place on."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from lightning_hybrid.functional.orders import share_of
from lightning_hybrid.parallel.mesh import Mesh


class Order:
    """The order of a dataset's samples over all replicas, anew for each pass.

    Args:
        dataset: Its length counts.
        kind: "sequential"; "seeded", a permutation of a seed and the epoch, as `DistributedSampler` draws it; or
            "drawn", one from a generator, as `RandomSampler` does.
        seed: Of the kind "seeded".
        generator: Of the kind "drawn"; None draws a seed from torch's global stream.

    Attributes:
        drawn: State of the generator from which the permutation of the present pass was drawn.
        resumed: Such a state, from which the next pass is drawn once more.
        mesh: Where replicas share an order that is drawn from a global stream, that of the first one; else None.
    """

    def __init__(self, dataset: Sized, kind: str, *, seed: int = 0, generator: torch.Generator | None = None) -> None:
        self.dataset, self.kind, self.seed, self.generator = dataset, kind, seed, generator
        self.drawn: Tensor | None = None
        self.resumed: Tensor | None = None
        self.mesh: Mesh | None = None

    def take(self, epoch: int) -> range | Tensor:
        """The numbers of all samples, ``[N]``, for one pass."""
        if self.kind == "sequential":
            return range(len(self.dataset))
        generator = self._drawing() if self.kind == "drawn" else torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(len(self.dataset), generator=generator)

    def _drawing(self) -> torch.Generator:
        if self.resumed is not None:
            generator, self.resumed = torch.Generator().set_state(self.resumed), None
        elif self.generator is not None:
            generator = self.generator
        else:
            generator = torch.Generator().manual_seed(self._draw_seed())
        self.drawn = generator.get_state()
        return generator

    def _draw_seed(self) -> int:
        seed = torch.empty((), dtype=torch.int64).random_()  # as `RandomSampler` does, so that its order is the same
        if self.mesh is not None:
            common = seed.to(self.mesh.device)
            dist.broadcast(common, self.mesh.data_ranks[0], group=self.mesh.data_group)
            seed = common
        return int(seed)


class Share(Sampler[int]):
    """A replica's share of an order.

    Args:
        source: The sampler in whose place it stands.
        order: Over all replicas that share the dataset.
        replicas: How many do; 1 where each has data of its own.
        rank: Of this one.
    """

    def __init__(self, source: Sampler[int], order: Order, replicas: int, rank: int) -> None:
        self.source, self.order, self.replicas, self.rank = source, order, replicas, rank
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Lightning tells of each epoch before its first batch is fetched."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        return self.rest(0)

    def rest(self, skip: int) -> Iterator[int]:
        """The samples of this replica behind the first `skip`; nothing is drawn before the first is asked for."""
        epoch = self.source.epoch if isinstance(self.source, DistributedSampler) else self._epoch
        drop_last = isinstance(self.source, DistributedSampler) and self.source.drop_last
        yield from share_of(self.order.take(epoch), self.replicas, self.rank, drop_last=drop_last)[skip:]


class Batches(BatchSampler):
    """Batches of a share of an order.

    Args:
        sampler: The share.
        batch_size: Samples of a batch of this replica.
        drop_last: Whether a last batch of fewer samples is left out.
        ahead: Whether workers fetch the first batches as soon as there is an iterator.

    Attributes:
        position: Batches that the next pass leaves out.
    """

    sampler: Share

    def __init__(self, sampler: Share, batch_size: int, drop_last: bool, *, ahead: bool) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.position, self._ahead = 0, ahead

    def __iter__(self) -> Iterator[list[int]]:
        """The first pass is that of the first iterator, even if another one, for validation say, is read before.

        With workers torch makes two iterators, of which it reads the second, at once.
        """
        position = self.position
        if not self._ahead:
            self.position = 0
        return self._from(position)

    def _from(self, position: int) -> Iterator[list[int]]:
        if self._ahead:
            self.position = 0
        yield from BatchSampler(self.sampler.rest(position * self.batch_size), self.batch_size, self.drop_last)


def order_of(sampler: Any, agreed_seed: int | None) -> Order | None:
    """How a sampler orders its samples; None for samplers that cannot be told to go on from a place.

    Args:
        sampler: Of a training loader, as Lightning leaves it.
        agreed_seed: From which the ranks of a replica draw; None where they draw from their global streams.
    """
    if type(sampler) is SequentialSampler:
        return Order(sampler.data_source, "sequential")
    if type(sampler) is DistributedSampler:
        return Order(sampler.dataset, "seeded" if sampler.shuffle else "sequential", seed=sampler.seed)  # type: ignore[arg-type]
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        if sampler.generator is None and agreed_seed is not None:
            return Order(sampler.data_source, "seeded", seed=agreed_seed)
        return Order(sampler.data_source, "drawn", generator=sampler.generator)
    return None
