"""Carries out a lowered schedule: forward and backward of every micro-batch through the stages of this rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.functional.schedules import Action, Kind
from lightning_hybrid.parallel.mesh import Mesh
from lightning_hybrid.parallel.pipeline.auxiliary import auxiliary_weight
from lightning_hybrid.parallel.pipeline.plan import Plan
from lightning_hybrid.parallel.pipeline.run import Result
from lightning_hybrid.parallel.pipeline.transport import Transport

Event = tuple[int, Action, float, float]
"""(pipeline rank, action, start, end) in seconds of a clock that the processes of one machine share."""


def _no_seed(micro_batch: int, output: Any) -> tuple[Tensor, float]:
    raise AssertionError("this step has no backward pass")


@dataclass(frozen=True)
class Step:
    """One batch's worth of work.

    Attributes:
        name: The step's name and whatever identifies the batch: what random numbers are derived from.
        keys: For each micro-batch, what its plan is valid for.
        call: Runs the user's step on a micro-batch, by number.
        sizes: For each micro-batch, its samples.
        streams: For each micro-batch, what random numbers are derived from, if not from the name and its number.
    """

    name: tuple[object, ...]
    keys: Sequence[Hashable]
    call: Callable[[int], Any]
    sizes: Sequence[int] = ()
    streams: Sequence[tuple[object, ...]] = ()

    def stream(self, micro_batch: int) -> tuple[object, ...]:
        """What a micro-batch's random numbers are derived from."""
        return self.streams[micro_batch] if self.streams else (*self.name, micro_batch)


@dataclass
class Work:
    """What one step asks of the executor; one without backward passes needs no more than the first three.

    Attributes:
        program: This rank's lowered actions, in order.
        plans: For each micro-batch, the plan of each stage of this rank.
        forward: Runs (stage, micro-batch, payload); the result's payload goes to the next stage.
        seed: For a micro-batch and what the last stage returned for it: the scalar to differentiate and its weight.
        weight: Weight of a micro-batch's loss if known without the loss; None if it travels with the gradients.
        before_backward: Called before the backward of (stage, micro-batch).
        after_backward: Called after it.
    """

    program: Sequence[Action]
    plans: Sequence[dict[int, Plan]]
    forward: Callable[[int, int, list[Tensor]], Result]
    seed: Callable[[int, Any], tuple[Tensor, float]] = _no_seed
    weight: Callable[[int], float | None] = lambda micro_batch: None
    before_backward: Callable[[int, int], None] = lambda stage, micro_batch: None
    after_backward: Callable[[int, int], None] = lambda stage, micro_batch: None


@dataclass
class _Saved:
    """Both ends of a stage's graph for one micro-batch."""

    payload: list[Tensor]
    result: Result


@dataclass
class Executor:
    """Executes programs on one rank.

    Args:
        mesh: Groups and coordinates.
        num_stages: Stages of the whole model.

    Attributes:
        record: Keep the times of actions in `events`; a device is waited for around each of them.
        events: Times of the last step's actions, if recorded.
        peak_in_flight: Most micro-batches of the last step whose forward was done and whose backward was not, over
            chunks.
    """

    mesh: Mesh
    num_stages: int
    record: bool = False
    events: list[Event] = field(default_factory=list)
    peak_in_flight: int = 0

    def __post_init__(self) -> None:
        self._transport = Transport(self.mesh, self.num_stages)
        self._saved: dict[tuple[int, int], _Saved] = {}

    def run(self, work: Work) -> None:
        """Run one step's program to its end."""
        handlers = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.SEND_FORWARD: self._send_forward,
            Kind.RECV_FORWARD: self._post_forward,
            Kind.SEND_BACKWARD: self._send_backward,
            Kind.RECV_BACKWARD: self._post_backward,
        }
        self._saved.clear()
        self.events, self.peak_in_flight = [], 0
        self._gradients: dict[tuple[int, int], list[Tensor]] = {}
        for action in work.program:
            self._started = self._now()
            handlers[action.kind](work, action.stage, action.micro_batch)
            if self.record:
                self.events.append((self.mesh.pipeline_rank, action, self._started, self._now()))
        self._transport.finish()
        self._saved.clear()

    def _now(self) -> float:
        device = self.mesh.device
        if self.record and device.type != "cpu":  # one stream: a send may wait for a rank that waits for this one
            torch.get_device_module(device).current_stream(device).synchronize()
        return time.perf_counter()

    def _forward(self, work: Work, stage: int, micro_batch: int) -> None:
        payload = self._transport.take(stage, micro_batch, forward=True) if stage else []
        for tensor, spec in zip(payload, work.plans[micro_batch][stage].received if stage else (), strict=True):
            tensor.requires_grad_(spec.requires_grad and torch.is_grad_enabled())
        self._started = self._now()  # an action's time does not contain the wait for its input
        result = work.forward(stage, micro_batch, payload)
        if stage < self.num_stages - 1 or torch.is_grad_enabled():
            self._saved[stage, micro_batch] = _Saved(payload, result)
        self.peak_in_flight = max(self.peak_in_flight, len(self._saved))

    def _backward(self, work: Work, stage: int, micro_batch: int) -> None:
        saved = self._saved.pop((stage, micro_batch))
        weight = work.weight(micro_batch)
        if stage == self.num_stages - 1:
            loss, weight = work.seed(micro_batch, saved.result.output)
            roots, gradients = [loss] if loss.requires_grad else [], [torch.full_like(loss, weight)]
        else:
            roots = [tensor for tensor in saved.result.payload if tensor.requires_grad]
            gradients = self._transport.take(stage, micro_batch, forward=False)
            if weight is None:
                weight = gradients.pop().item() if work.plans[micro_batch][stage].auxiliary else 0.0
        self._started = self._now()
        work.before_backward(stage, micro_batch)
        if roots:
            with auxiliary_weight(weight):
                torch.autograd.backward(roots, gradients)
        work.after_backward(stage, micro_batch)
        if stage:
            self._gradients[stage, micro_batch] = self._payload_gradients(
                work, stage, micro_batch, saved.payload, weight
            )

    def _payload_gradients(
        self, work: Work, stage: int, micro_batch: int, payload: list[Tensor], weight: float
    ) -> list[Tensor]:
        gradients = [
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor in payload
            if tensor.requires_grad
        ]
        if self._weight_travels(work, stage, micro_batch):
            gradients.append(torch.tensor(weight, dtype=torch.float64, device=self.mesh.device))
        return gradients

    @staticmethod
    def _weight_travels(work: Work, stage: int, micro_batch: int) -> bool:
        return work.plans[micro_batch][stage].auxiliary and work.weight(micro_batch) is None

    def _send_forward(self, work: Work, stage: int, micro_batch: int) -> None:
        self._transport.send(self._saved[stage, micro_batch].result.payload, stage, micro_batch, forward=True)
        if not torch.is_grad_enabled():
            del self._saved[stage, micro_batch]  # an evaluation has no backward pass that would take it

    def _post_forward(self, work: Work, stage: int, micro_batch: int) -> None:
        buffers = [spec.buffer(self.mesh.device) for spec in work.plans[micro_batch][stage].received]
        self._transport.post(buffers, stage, micro_batch, forward=True)

    def _send_backward(self, work: Work, stage: int, micro_batch: int) -> None:
        self._transport.send(self._gradients.pop((stage, micro_batch)), stage, micro_batch, forward=False)

    def _post_backward(self, work: Work, stage: int, micro_batch: int) -> None:
        plan = work.plans[micro_batch][stage]
        buffers = [spec.buffer(self.mesh.device) for spec in plan.sent if spec.requires_grad]
        if self._weight_travels(work, stage, micro_batch):
            buffers.append(torch.empty((), dtype=torch.float64, device=self.mesh.device))
        self._transport.post(buffers, stage, micro_batch, forward=False)
