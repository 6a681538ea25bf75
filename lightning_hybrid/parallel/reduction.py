"""Sums gradients over replicas while the last backward passes of an accumulation window still run.

Gradients travel in buckets, each started as soon as its gradients are there (Li et al. 2020, arXiv:2006.15704, section
3.2.3). `DistributedDataParallel`'s own reducer cannot do it: it expects one backward pass for each forward pass, and a
pipeline stage has many.

Starting early is never a matter of correctness. A gradient leaves its parameter when its bucket starts; what a backward
pass adds after that, as it may with reentrant checkpoints, is found at the end and summed on its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.parallel.gradients import make_buckets, sum_gradients

FIRST_BUCKET_BYTES = 2**20  # small, so that the first message starts early


@dataclass
class _Bucket:
    """Parameters of one type whose gradients travel together."""

    parameters: list[nn.Parameter]
    missing: set[nn.Parameter] = field(default_factory=set)
    views: list[Tensor] = field(default_factory=list)
    work: Any = None

    def __post_init__(self) -> None:
        # a gradient is laid out as its parameter; one that has holes or overlaps gives way to a dense one
        self._strides = [torch.empty_like(parameter, device="meta").stride() for parameter in self.parameters]

    def start(self, group: dist.ProcessGroup, dtype: torch.dtype | None) -> list[bool]:
        """Take the gradients, zeros where there is none, and start to sum them; tell which there were."""
        like = self.parameters[0]
        flat = torch.empty(sum(p.numel() for p in self.parameters), dtype=dtype or like.dtype, device=like.device)
        offsets = accumulate([p.numel() for p in self.parameters], initial=0)
        layouts = zip(self.parameters, self._strides, offsets, strict=False)
        self.views = [flat.as_strided(p.shape, stride, offset) for p, stride, offset in layouts]
        present = [parameter.grad is not None for parameter in self.parameters]
        with torch.no_grad():
            for parameter, view in zip(self.parameters, self.views, strict=True):
                view.zero_() if parameter.grad is None else view.copy_(parameter.grad)
                parameter.grad = None
        self.work = dist.all_reduce(flat, group=group, async_op=True)
        return present


class Reduction:
    """The sums of one window's gradients over a group.

    Args:
        parameters: The same on every rank, in the order in which their gradients are expected to be final.
        group: The replicas.
        dtype: Type in which gradients are summed; None takes each parameter's own.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, dtype: torch.dtype | None = None
    ) -> None:
        self.parameters, self._group, self._dtype = list(parameters), group, dtype
        self._buckets = [_Bucket(bucket) for bucket in make_buckets(self.parameters, FIRST_BUCKET_BYTES)]
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._hooks: list[Any] = []
        self.reset()

    def reset(self) -> None:
        """Forget a window, whether it came to its end or not."""
        self.unwatch()
        self._next, self._present = 0, list[bool]()
        for bucket in self._buckets:
            bucket.missing, bucket.views, bucket.work = set(bucket.parameters), [], None

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """From now on a gradient of these is final when a backward pass has added to it; others are left alone."""
        own = [parameter for parameter in parameters if parameter in self._bucket_of]
        self._hooks += [parameter.register_post_accumulate_grad_hook(self._is_final) for parameter in own]

    def unwatch(self) -> None:
        """Let backward passes alone."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        """The gradients of these are final, and those that are not there will not come; others are left alone."""
        for parameter in parameters:
            if parameter in self._bucket_of:
                self._bucket_of[parameter].missing.discard(parameter)
        self._start_complete()

    def finish(self) -> None:
        """Wait for all sums, and make them the gradients.

        A parameter without a gradient on any rank stays without; one with a gradient on some rank gets the sum
        everywhere.
        """
        self.unwatch()
        self.complete(self.parameters)
        ordered = [parameter for bucket in self._buckets for parameter in bucket.parameters]
        late = [parameter.grad is not None for parameter in ordered]
        counts = torch.tensor([self._present, late], dtype=torch.int32, device=ordered[0].device)
        dist.all_reduce(counts, group=self._group)
        present, late = counts.tolist()
        late_ones = [p for p, ranks in zip(ordered, late, strict=True) if ranks]
        sum_gradients(late_ones, self._group, at_least=self._dtype)
        for bucket in self._buckets:
            bucket.work.wait()
        views = [view for bucket in self._buckets for view in bucket.views]
        with torch.no_grad():
            for parameter, view, ranks in zip(ordered, views, present, strict=True):
                if ranks:
                    total = view if parameter.grad is None else view.add_(parameter.grad)
                    parameter.grad = total.to(parameter.dtype)
        self.reset()

    def _is_final(self, parameter: Tensor) -> None:
        self._bucket_of[parameter].missing.discard(parameter)  # type: ignore[index]
        self._start_complete()

    def _start_complete(self) -> None:
        """Start in order, so that all ranks do alike whatever their graphs are."""
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._present += self._buckets[self._next].start(self._group, self._dtype)
            self._next += 1
