"""Copies between host and device that run beside computation, where there is an accelerator; else at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class Transfers:
    """Streams of one device for both directions; on the CPU, host and device are the same memory, and nothing waits.

    Args:
        device: Where computation runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._module: Any = module if hasattr(module, "Stream") else None  # else copies are done when they return
        self._inwards: Any = None if self._module is None else self._module.Stream(device)
        self._outwards: Any = None if self._module is None else self._module.Stream(device)

    @property
    def has_streams(self) -> bool:
        """Whether copies run beside computation."""
        return self._module is not None

    @property
    def is_apart(self) -> bool:
        """Whether the device has other memory than the host."""
        return self.device.type != "cpu"

    def start(self, copies: Callable[[], object]) -> Any:
        """Start copies to the device, behind all that has been asked of it so far: what they overwrite has been read.

        Returns:
            The event for `wait`.
        """
        return self._beside(self._inwards, copies)

    def wait(self, event: Any) -> bool:
        """Let computation that is asked for from now on wait for copies; returns whether it has to."""
        if event is None:
            return False
        is_late = not event.query()
        self._module.current_stream(self.device).wait_event(event)
        return is_late

    def synchronize(self) -> None:
        """Wait here until all copies to the device are done: what they read may be written to."""
        if self._inwards is not None:
            self._inwards.synchronize()

    def to_host(self, gradient: Tensor, arrival: Arrival) -> Tensor:
        """A copy of a gradient in host memory, whose values are there after `arrival.wait()`."""
        if self._module is None or gradient.layout is not torch.strided:
            return gradient.to("cpu")
        host = torch.empty_like(gradient, device="cpu", pin_memory=True)
        arrival.event = self._beside(self._outwards, lambda: host.copy_(gradient, non_blocking=True))
        gradient.record_stream(self._outwards)  # its memory is not to be given away before it has been read
        if torch.is_anomaly_enabled():  # it looks at the values at once
            arrival.wait()
        return host

    def _beside(self, stream: Any, copies: Callable[[], object]) -> Any:
        if self._module is None:
            copies()
            return None
        stream.wait_stream(self._module.current_stream(self.device))
        with self._module.stream(stream):
            copies()
            event = self._module.Event()
            event.record(stream)
        return event


class Arrival:
    """When a gradient that is on its way to the host is there."""

    event: Any = None

    def wait(self) -> None:
        """Wait for it."""
        if self.event is not None:
            self.event.synchronize()


class _Deliver(Function):
    """Behind `_Fetch`, on the host's side of the graph: only its thread waits, while the device's goes on asking."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, arrival: Arrival) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.arrival = arrival
        return parameter.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.arrival.wait()
        return gradients[0], None


class _Fetch(Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copy: list[Tensor], transfers: Transfers, arrival: Arrival) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.transfers, ctx.arrival = transfers, arrival
        return copy.pop()  # in a list: autograd does not ask where it comes from, and the graph does not hold it

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = gradients[0]
        return None if gradient is None else ctx.transfers.to_host(gradient, ctx.arrival), None, None, None


def fetched(parameter: Tensor, copy: Tensor, transfers: Transfers) -> Tensor:
    """A copy on the device that stands for a parameter on the host, which gets its gradient.

    Args:
        parameter: A leaf.
        copy: Equal values on the device, in memory of their own.
        transfers: They bring the gradient back.
    """
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        return copy
    arrival = Arrival()
    shown: Tensor = _Fetch.apply(_Deliver.apply(parameter, arrival), [copy], transfers, arrival)
    return shown
