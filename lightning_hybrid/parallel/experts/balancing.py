"""What layers and routers count over the replicas to keep their experts in balance: told when and with whom."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_hybrid.parallel.mesh import Mesh


class Balancing:
    """The modules of a model that count, found by what they have.

    `balance_group` takes the replicas that count together, `reduces` is False while passes are not to be counted, and
    `start_window()` begins an accumulation window. One whose `balance_over` is not "sequence" counts in every pass.

    Args:
        root: The model.
        mesh: Groups of this rank.
    """

    def __init__(self, root: nn.Module, mesh: Mesh) -> None:
        self._modules: list[Any] = [module for module in root.modules() if hasattr(type(module), "balance_group")]
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
