"""How a batch is cut into micro-batches; one that joins several of the loader's is cut as each of them would be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import LightningModule

from lightning_hybrid.functional.schedules import usable_microbatches
from lightning_hybrid.parallel.engine import Engine
from lightning_hybrid.parallel.pipeline.microbatch import (
    batch_size,
    check_even,
    check_visible,
    split_batch,
    split_by,
    split_sizes,
)
from lightning_hybrid.strategies.loaders import check_same_batch

CHECKED_BATCHES = 3  # batches of each kind of step whose equality over a replica's ranks is checked


@dataclass(frozen=True)
class Split:
    """A batch's micro-batches.

    Attributes:
        parts: What each step is given.
        sizes: Samples of each.
        places: For each, the number of its batch among those that are joined, and its number there; empty if the
            batch is one of the loader's.
    """

    parts: Sequence[Any] = ()
    sizes: Sequence[int] = ()
    places: Sequence[tuple[int, int]] = ()


def streams_of(split: Split, name: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """For each micro-batch of joined batches, what its random numbers are derived from: what they would be unjoined.

    Args:
        split: The batch; nothing is returned for one that is not joined.
        name: Of its first loader batch, with the number of that batch at the end.
    """
    return [(*name[:-1], name[-1] + number, index) for number, index in split.places]


@dataclass
class Splitter:
    """Cuts batches for an engine.

    Args:
        module: The user's module.
        engine: The engine.
        schedule: Name of the schedule.
        num_chunks: Stages of each rank.
        num_microbatches: Wanted number, or "auto".

    Attributes:
        joined: Samples of the loader batches that the next training batch is made of; empty if it is one of them.
    """

    module: LightningModule
    engine: Engine
    schedule: str
    num_chunks: int
    num_microbatches: int | str
    joined: Sequence[int] = ()
    _checked: dict[str, int] = field(default_factory=dict)

    @property
    def wanted(self) -> int:
        """Micro-batches of one loader batch that has samples enough."""
        if not isinstance(self.num_microbatches, str):
            return self.num_microbatches
        pipeline = self.engine.mesh.layout.pipeline
        return 1 if pipeline == 1 else 4 * pipeline

    def split(self, batch: Any, hook: str) -> Split:
        """Cut a batch.

        Args:
            batch: Of one replica.
            hook: Name of the step that it is for.

        Raises:
            RuntimeError: If it has not the samples of the batches that it is said to join.
        """
        layout, training = self.engine.mesh.layout, hook == "training_step"
        if layout.replica > 1 and self._checked.get(hook, 0) < CHECKED_BATCHES:
            self._checked[hook] = self._checked.get(hook, 0) + 1
            check_same_batch(batch, self.engine.mesh)
        samples = batch_size(batch)
        self.engine.num_samples = samples
        if training and self.joined:
            return self._split_joined(batch, samples)
        usable = self._usable(samples)
        custom = getattr(self.module, "split_batch", None)
        if custom is None and (usable > 1 or self.wanted != 1 or layout.data > 1):
            check_visible(batch)
        usable = self._agreed(usable) if training else usable
        parts = list(custom(batch, usable)) if callable(custom) else split_batch(batch, usable)
        if training and callable(custom):
            check_even(*self.engine.spread(len(parts)))
        return Split(parts, [batch_size(part) for part in parts])

    def _split_joined(self, batch: Any, samples: int) -> Split:
        """No micro-batch has samples of two loader batches, which may weigh differently."""
        if samples != sum(self.joined):
            raise RuntimeError(
                f"The loader gave batches of {', '.join(map(str, self.joined))} samples, which were joined, and hooks "
                f"have made {samples} samples of them: which of them belong to which batch is not known. Keep the "
                "number of samples in on_before_batch_transfer and on_after_batch_transfer, or do not let batches be "
                "joined."
            )
        cuts = [split_sizes(size, self._agreed(self._usable(size))) for size in self.joined]
        sizes = [size for cut in cuts for size in cut]
        places = [(number, index) for number, cut in enumerate(cuts) for index in range(len(cut))]
        return Split(split_by(batch, sizes), sizes, places)

    def _usable(self, samples: int) -> int:
        pipeline = self.engine.mesh.layout.pipeline
        return usable_microbatches(self.schedule, pipeline, self.num_chunks, self.wanted, max(samples, 1))

    def _agreed(self, usable: int) -> int:
        """Where replicas run equally many passes, as many as all can have."""
        return self.engine.spread(usable)[0] if self.wanted > 1 else usable
