"""Gradients of an accumulation window in host memory, so that the device has none while forward passes run."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightning_hybrid.parallel.checkpoint.places import Place
from lightning_hybrid.parallel.gradients import like_local, local


class HostAccumulation:
    """Sums the gradients of a window's batches on the host, each in the type that it has.

    The gradients are those that are left after a batch has been reduced over the replicas: in ZeRO's stages 1 to 3 a
    rank sends only those of its shards. `CPUOffloadPolicy` does not serve here: it moves parameters too.
    """

    def __init__(self) -> None:
        self._sums: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def take(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take the gradients of a batch away from the parameters, and add them."""
        for parameter in parameters:
            if parameter.grad is not None:
                gradient = local(parameter.grad).to("cpu")
                total = self._sums.get(parameter)
                self._sums[parameter] = gradient if total is None else total.add_(gradient)
                parameter.grad = None

    @torch.no_grad()
    def give_back(self) -> None:
        """Add the sums to the gradients that are there after the window's last batch."""
        for parameter, total in self._sums.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = local(parameter.grad)
            gradient.add_(total.to(gradient.device))
        self._sums.clear()

    def forget(self) -> None:
        """Drop a window that is not going to be applied."""
        self._sums.clear()

    def place(self, parameter: nn.Parameter) -> Place:
        """Where a parameter's sum is: over all replicas, and no more on the parameter."""

        def get() -> Tensor | None:
            total = self._sums.get(parameter)
            return None if total is None else like_local(total, parameter)

        def empty() -> Tensor:
            return like_local(torch.empty_like(local(parameter.detach()), device="cpu"), parameter)

        def put(gradient: Tensor) -> None:
            self._sums[parameter] = local(gradient)

        return Place("all", 0, 1, get, empty, put)

    def num_bytes(self) -> int:
        """Bytes that are held on the host."""
        return sum(total.numel() * total.element_size() for total in self._sums.values())
