"""What `training_step` returns, and what it may not do."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.parallel.mesh import Mesh

LOSS = "loss"


@dataclass
class Counts:
    """Micro-batches of one batch whose step returned a `loss_weight`, and the others."""

    weighted: int = 0
    plain: int = 0


@dataclass
class Window:
    """What is known of an accumulation window besides its gradients.

    Attributes:
        weight: Sum of the loss weights so far; 0 where the step returns none.
        num_batches: Batches so far.
        loss_scale: What their losses have been multiplied by.
        weight_unit: What their loss weights have been divided by.
    """

    weight: float = 0.0
    num_batches: int = 0
    loss_scale: float = 1.0
    weight_unit: float = 1.0

    def add(self, num_weighted: float, num_plain: float, weight: float, turn: Turn) -> None:
        """Count one batch of all replicas.

        Args:
            num_weighted: Micro-batches whose step returned a weight.
            num_plain: Those whose step returned none.
            weight: Sum of the weights.
            turn: The batch's place.

        Raises:
            ValueError: If some micro-batches of a window have a weight and others have none.
        """
        if turn.first:
            self.weight = 0.0
        self.num_batches = turn.index + turn.count
        self.loss_scale, self.weight_unit = turn.loss_scale, turn.weight_unit
        if num_plain and (num_weighted or self.weight):
            raise ValueError(
                f"training_step returned a loss_weight for {num_weighted:.0f} micro-batches and none for "
                f"{num_plain:.0f} of the same accumulation window. Return it always or never."
            )
        self.weight += weight if num_weighted else 0.0

    def factor(self, turn: Turn) -> float:
        """What its gradients are multiplied by where those of the next batch are scaled in another way."""
        unit = self.weight_unit / turn.weight_unit if self.weight else 1.0
        return turn.loss_scale / self.loss_scale * unit


@dataclass(frozen=True)
class Turn:
    """A batch's place in its accumulation window, and how its losses are scaled.

    Attributes:
        accumulate: `accumulate_grad_batches`.
        index: Batches of the window before this one.
        last: The batch ends it.
        loss_scale: What losses are multiplied by before they are differentiated.
        weight_unit: Power of two that loss weights are divided by meanwhile.
        count: Batches of the loader that are joined in it.
    """

    accumulate: int = 1
    index: int = 0
    last: bool = True
    loss_scale: float = 1.0
    weight_unit: float = 1.0
    count: int = 1

    @property
    def first(self) -> bool:
        """The batch starts a window."""
        return self.index == 0

    def weigh(self, weight: float) -> float:
        """What a loss of a given weight is multiplied by."""
        return weight / self.weight_unit * self.loss_scale


class Shares:
    """Each micro-batch's share of the samples of its batch over all replicas, by Lightning's rule for accumulation.

    Args:
        mesh: Groups of this rank; all replicas make one together.
        sizes: Samples of this replica's micro-batches.
        turn: The batch's place in its accumulation window.
        batches: For each micro-batch, the number of its batch among those that are joined; empty if there is only one.

    Attributes:
        sizes: As given.
    """

    def __init__(self, mesh: Mesh, sizes: Sequence[int], turn: Turn, batches: Sequence[int] = ()) -> None:
        self.sizes, self._turn, self._batches = sizes, turn, batches or [0] * len(sizes)
        self._totals = [0] * turn.count
        for number, size in zip(self._batches, sizes, strict=True):
            self._totals[number] += size
        self._work: Any = None
        if mesh.layout.data > 1:  # the sums travel while the first micro-batches compute
            self._sums = torch.tensor(self._totals, device=mesh.device)
            self._work = dist.all_reduce(self._sums, group=mesh.data_group, async_op=True)

    def __call__(self, micro_batch: int) -> float:
        """The share of one micro-batch, times the loss scale."""
        if self._work is not None:
            self._work.wait()
            self._work, self._totals = None, self._sums.tolist()
        total = self._totals[self._batches[micro_batch]]
        return self.sizes[micro_batch] / total / self._turn.accumulate * self._turn.loss_scale


def warn_of_dropped(name: str, value: object) -> None:
    """Say that a step's output goes no further."""
    warnings.warn(
        f"The step returns {name or 'a value'} of type {type(value).__name__}, which is not a floating-point scalar: "
        "it is not passed on to hooks, because each rank has only a part of it.",
        stacklevel=4,
    )


def refuse_all_gather(*args: Any, **kwargs: Any) -> NoReturn:
    """Stand for `LightningModule.all_gather` in a step that runs in several parts.

    Raises:
        RuntimeError: Always.
    """
    raise RuntimeError(
        "self.all_gather in a step would join different micro-batches, because ranks run them at different times. "
        "Gather in a hook such as on_train_batch_end, or set pipeline_parallel_size=1 and num_microbatches=1."
    )


@contextmanager
def refusing_all_gather(module: nn.Module) -> Iterator[None]:
    """Context in which the module's `all_gather` is refused: other ranks are not in the same step at the same time."""
    vars(module)["all_gather"] = refuse_all_gather
    try:
        yield
    finally:
        del vars(module)["all_gather"]


def check_loss(output: Any) -> Tensor:
    """The scalar tensor in what `training_step` returned.

    Raises:
        TypeError: If there is none.
    """
    loss = output.get(LOSS) if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TypeError(
            f"training_step returned {type(output).__name__} without a scalar loss tensor. Under this strategy it must "
            'return the loss, or a dictionary with "loss" (and "loss_weight" for an exactly weighted mean). To skip a '
            "batch, return the loss times zero."
        )
    return loss


def loss_of(output: Any) -> tuple[Tensor, float | None]:
    """(loss, its weight or None) of what `training_step` returned; a loss of 16 bits could not hold a scaled seed."""
    weight = output.get("loss_weight") if isinstance(output, Mapping) else None
    loss = check_loss(output).reshape(())
    return loss.float() if loss.dtype.itemsize == 2 else loss, None if weight is None else float(weight)
