"""Gradients of each micro-batch of each replica: squares, and weights in the step's gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.functional.noise_scale import GradientSums
from lightning_hybrid.parallel.engine import Engine
from lightning_hybrid.parallel.gradient_squares import GradientSquares
from lightning_hybrid.parallel.pipeline.executor import Step, Work


class SmallGradients:
    """Takes squares in the backward passes of an engine, until `remove`.

    Args:
        engine: What runs steps.
        optimizer: Its parameters count, each once.

    Raises:
        ValueError: If a micro-batch's gradient is nowhere whole, or not of that micro-batch alone.
    """

    def __init__(self, engine: Engine, optimizer: Optimizer) -> None:
        self._engine, self._optimizer, self._squares = engine, optimizer, GradientSquares()
        self._sizes: Sequence[int] = ()
        self._seen: list[set[str]] = []
        self._table = torch.zeros(0, 2, dtype=torch.float64)
        _check_axes(engine)
        engine.observers.append(self.observe)

    def remove(self) -> None:
        """Let the engine alone."""
        self._squares.remove()
        if self.observe in self._engine.observers:
            self._engine.observers.remove(self.observe)

    def observe(self, step: Step, work: Work) -> Work:
        """A batch's work, such that its backward passes are looked at."""
        self._squares.watch(self._counted(), self._engine.data.leaf)
        self._sizes = step.sizes
        self._table = torch.zeros(len(step.sizes), 2, dtype=torch.float64, device=self._engine.mesh.device)
        self._seen = [set[str]() for _ in step.sizes]

        def seed(micro_batch: int, output: Any) -> tuple[Tensor, float]:
            loss, weight = work.seed(micro_batch, output)
            self._table[micro_batch, 1] = weight
            return loss, weight

        def before_backward(stage: int, micro_batch: int) -> None:
            work.before_backward(stage, micro_batch)
            self._squares.begin(self._seen[micro_batch])

        def after_backward(stage: int, micro_batch: int) -> None:
            self._table[micro_batch, 0] += self._squares.end()
            work.after_backward(stage, micro_batch)

        return replace(work, seed=seed, before_backward=before_backward, after_backward=after_backward)

    def sums(self, factor: float, *, by_weight: bool) -> GradientSums:
        """Of the last batch of all replicas; all ranks call it together.

        Args:
            factor: What the weights of losses are multiplied by.
            by_weight: Steps return the weights, which count in place of samples.

        Raises:
            ValueError: If several ranks of a pipeline have parts of a parameter's gradient.
        """
        mesh, shared = self._engine.mesh, self._shared()
        used = torch.tensor([any(name in seen for seen in self._seen) for name in shared], dtype=torch.float64)
        replica = torch.cat([self._table.flatten(), used.to(mesh.device)])
        if mesh.layout.pipeline > 1:
            dist.all_reduce(replica, group=mesh.pipeline_group)
        table, holders = replica.split([self._table.numel(), len(shared)])
        mine = [*self._weighted(table.view(-1, 2).tolist(), factor, by_weight), *(holders > 1).tolist()]
        total = torch.tensor(mine, dtype=torch.float64, device=mesh.device) * (mesh.pipeline_rank == 0)
        dist.all_reduce(total)
        sums, refused = total[:5].tolist(), total[5:].tolist()
        _check_parts([name for name, replicas in zip(shared, refused, strict=True) if replicas])
        return GradientSums(*sums)

    def _weighted(self, table: list[list[float]], factor: float, by_weight: bool) -> GradientSums:
        """Of this replica's micro-batches, what its rank of the tensor axis counts."""
        rows = []
        for (square, seed), samples in zip(table, self._sizes, strict=True):
            weight = seed * factor
            rows.append((square / seed**2 if seed else 0.0, weight if by_weight else float(samples), weight))
        sums = GradientSums.of(rows)
        # other ranks of the tensor axis have other slices of the same gradients
        return sums if self._engine.mesh.tensor_rank == 0 else GradientSums(squares=sums.squares)

    def _shared(self) -> list[str]:
        """Names of parameters that several ranks of a pipeline hold, and may use."""
        ownership = self._engine.ownership
        return [name for name, ranks in ownership.holders.items() if len(ranks) > 1] if ownership is not None else []

    def _counted(self) -> dict[str, nn.Parameter]:
        """Of this rank's parameters those that it counts in the gradients of its own replica."""
        engine, held = self._engine, {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        splits = engine.tensor.splits if engine.tensor is not None else ()
        once = engine.mesh.tensor_rank == 0
        return {n: p for n, p in engine.named_parameters().items() if id(p) in held and (once or n in splits)}


def _check_parts(names: Sequence[str]) -> None:
    if names:
        raise ValueError(
            f"Several stages use {names[0]}, as with tied embeddings: each has a part of a micro-batch's gradient, and "
            "the square of their sum cannot be had from parts. Untie it, give pipeline_parallel_size=1, or leave out "
            "what measures the gradient noise scale."
        )


def _check_axes(engine: Engine) -> None:
    if engine.experts is not None:
        raise ValueError(
            f"expert_parallel_size={engine.mesh.layout.expert}: an expert's gradient is of tokens of several replicas, "
            "so that no micro-batch has one of its own. Give expert_parallel_size=1, or leave out what measures the "
            "gradient noise scale."
        )
    if engine.deferred_parameters():
        raise ValueError(
            "sequence_parallel=True: ranks of the tensor axis have parts of the gradients of whole parameters, which "
            "are summed once a step, and not for each micro-batch. Give sequence_parallel=False, or leave out what "
            "measures the gradient noise scale."
        )
