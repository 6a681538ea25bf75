"""Which evaluation batches are real, and loaders on which all ranks agree."""

from __future__ import annotations

import os
from collections import Counter

from lightning_hybrid.parallel.mesh import Mesh
from lightning_hybrid.parallel.streams import derived_seed
from lightning_hybrid.strategies.loaders import EvenLoader, agree_on_order, remove_padding

EVALUATIONS = ("val", "test")


class DataLoaders:
    """Loaders of all stages, as Lightning asks for them: a barrier names the kind, then each loader passes through."""

    def __init__(self) -> None:
        self._kind = ""
        self._loaders: dict[str, list[EvenLoader]] = {}
        self._steps: Counter[tuple[str, int]] = Counter()

    def announce(self, name: str | None) -> None:
        """Take note of the barrier that Lightning enters before it prepares the loaders of one kind."""
        if name and name.endswith("_dataloader()"):
            self._kind = name.removesuffix("_dataloader()")
            self._loaders[self._kind] = []

    def process(self, loader: object, mesh: Mesh, seed: int) -> object:
        """Make one loader agree over the stages of a replica and, in evaluation, count each sample once."""
        agreed = mesh.layout.data == 1 and "PL_GLOBAL_SEED" in os.environ  # all ranks draw alike, as one process does
        if mesh.layout.pipeline > 1 and not agreed:
            agree_on_order(
                loader, derived_seed(seed, self._kind, len(self._loaders.get(self._kind, [])), mesh.data_rank)
            )
        if self._kind not in EVALUATIONS or mesh.layout.data == 1:
            return loader
        remove_padding(getattr(loader, "sampler", None))
        even = EvenLoader(loader, mesh)
        self._loaders[self._kind].append(even)
        return even

    def start(self, kind: str) -> None:
        """An evaluation begins."""
        for key in [key for key in self._steps if key[0] == kind]:
            del self._steps[key]

    def next_counts(self, kind: str, loader: int) -> bool:
        """Whether the next batch of a loader is one of the replica's own."""
        index = self._steps[kind, loader]
        self._steps[kind, loader] += 1
        loaders = self._loaders.get(kind, [])
        return loader >= len(loaders) or index < loaders[loader].num_real
