"""What layers and routers count over the replicas to keep their experts in balance: told when and with whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_hybrid.parallel.experts.counting import sums_over
from lightning_hybrid.parallel.mesh import Mesh


class Balancing:
    """The modules of a model that count, found by what they have.

    `balance_group` takes the replicas that count together, `reduces` is False while passes are not to be counted, and
    `start_window()` begins an accumulation window. One whose `balance_over` is not "sequence" counts in every pass.
    Where `counts_windows` is True, `window_counts(first=...)` gives what a rank has to add to the sum over the
    replicas, and `resume_window(sum, first=...)` takes that sum; `first` is True on the first replica.

    Args:
        root: The model.
        mesh: Groups of this rank.
    """

    def __init__(self, root: nn.Module, mesh: Mesh) -> None:
        named = {name: module for name, module in root.named_modules() if hasattr(type(module), "balance_group")}
        self._modules: list[Any] = list(named.values())
        self._counting: dict[str, Any] = {name: module for name, module in named.items() if module.counts_windows}
        self._mesh = mesh
        self._group = mesh.data_group if mesh.layout.data > 1 else None

    @property
    def in_passes(self) -> bool:
        """Whether replicas meet in each training pass, of which they must then run equally many."""
        return any(getattr(module, "balance_over", "sequence") != "sequence" for module in self._modules)

    def install(self) -> None:
        """From now on the replicas count together."""
        for module in self._modules:
            module.balance_group = self._group

    def remove(self) -> None:
        """Each process counts for itself: the replicas take no more part in steps that follow elsewhere."""
        for module in self._modules:
            module.balance_group = None

    def start_window(self) -> None:
        """A window's first batch is about to run."""
        for module in self._modules:
            module.start_window()

    def window(self) -> dict[str, list[int]]:
        """Counts of the window so far by module, equal on all ranks, which call it together."""
        if not self._counting:
            return {}
        counts = [module.window_counts(first=self._mesh.data_rank == 0) for module in self._counting.values()]
        for group in (self._mesh.data_group, self._mesh.pipeline_group):  # a layer counts on its own stage
            counts = sums_over(group, [count.to(self._mesh.device) for count in counts])
        return {name: count.tolist() for name, count in zip(self._counting, counts, strict=True)}

    def resume_window(self, counts: Mapping[str, list[int]]) -> None:
        """Go on with what `window` gave."""
        first = self._mesh.data_rank == 0
        for name, module in self._counting.items():
            if name in counts:
                module.resume_window(torch.tensor(counts[name], device=self._mesh.device), first=first)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Context of passes that train nothing, which replicas may run on their own."""
        for module in self._modules:
            module.reduces = False
        try:
            yield
        finally:
            for module in self._modules:
                module.reduces = True
