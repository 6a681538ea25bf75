"""What a strategy tells of a run to whoever asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.functional.noise_scale import GradientSums
from lightning_hybrid.parallel.checkpoint.parts import Part, part_of
from lightning_hybrid.parallel.passes_under_way import PassesUnderWay
from lightning_hybrid.parallel.pipeline.executor import Event
from lightning_hybrid.parallel.small_gradients import SmallGradients
from lightning_hybrid.parallel.zero.measuring import own_passes
from lightning_hybrid.strategies.states import StatefulStrategy


class MeasuredStrategy(StatefulStrategy):
    """Gradients and their norms, states that are to come, times of a schedule's actions, and whole parameters."""

    def gradient_parts(self, optimizer: Optimizer) -> dict[str, Part]:
        """What this rank has of the gradients of a step that is about to come, as in `on_before_optimizer_step`.

        Args:
            optimizer: Its parameters count.

        Returns:
            By names of the unmodified module: boxes of the whole gradient, each with a view of this rank's memory. A
            parameter without gradient is left out.
        """
        engine = self.assembly.engine
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        named = ((name, p) for name, p in engine.named_parameters().items() if p in held and p.grad is not None)
        return {name: part_of(p.grad, *(engine.share(name) or ())) for name, p in named if p.grad is not None}

    @property
    def num_microbatches(self) -> int:
        """Micro-batches that a replica's batch of samples enough is cut into; known once the model has been set up."""
        return self.assembly.runner.splitter.wanted

    @property
    def counts_samples(self) -> bool:
        """Whether places in the training data count samples of all replicas, so that others can go on in an epoch."""
        return self.evaluation.loaders.positions.are_known

    @property
    def joined_batches(self) -> int:
        """Batches of the loader that the training batch under way joins."""
        return max(1, len(self.assembly.runner.splitter.joined))

    def join_batches(self, sizes: Sequence[int]) -> None:
        """Say that the next training batch joins several of the loader's, in this order.

        It is trained on as on an accumulation of them, in one run of the schedule: each is cut and weighted as without
        the others, and draws its own random numbers. The training loop counts all of them.

        Args:
            sizes: Samples of each; empty if it joins none.
        """
        self.assembly.runner.splitter.joined = tuple(sizes)

    @property
    def awaits_optimizer_states(self) -> bool:
        """Whether states of optimizers that a checkpoint has are still to be loaded, with the first batch."""
        return self.assembly.awaits_states

    def held_parameters(self) -> dict[str, nn.Parameter]:
        """What this rank has of the parameters, by names of the unmodified module, as the optimizers have it."""
        return self.assembly.engine.named_parameters()

    def set_apart(self) -> dict[str, str]:
        """Parameters whose gradients calls on this rank do not make alone, by names of the unmodified module: why."""
        engine, cut = self.assembly.engine, self.assembly.engine.cut
        apart = dict.fromkeys(engine.tensor.splits, "it is split over the tensor axis") if engine.tensor else {}
        if engine.tensor is not None:
            apart |= dict.fromkeys(engine.tensor.deferred, "ranks of the tensor axis have shards of its sequence")
        if engine.experts is not None:
            apart |= dict.fromkeys(engine.experts.splits, "it is split over the expert axis")
        if cut is not None and engine.ownership is not None:
            shared = (name for name, ranks in engine.ownership.holders.items() if len(ranks) > 1)
            tied = {first: f"it is tied to {other}" for other, first in cut.aliases.items()}
            apart |= dict.fromkeys(shared, "several stages use it") | tied
            apart |= {other: f"it is tied to {first}" for other, first in cut.aliases.items()}
        return apart

    def window_factor(self) -> float:
        """What gradients in the window's backward passes are multiplied by to be parts of the step's gradient.

        Call it behind the window's last batch, as in `on_before_optimizer_step`. Parts of all ranks then sum to it.
        """
        window = self.assembly.runner.window
        unit = window.weight_unit / window.weight if window.weight > 0 else 1.0
        return unit / window.loss_scale

    @property
    def weighs_losses(self) -> bool:
        """Whether steps of the window under way have returned a `loss_weight`; known behind its first batch."""
        return self.assembly.runner.window.weight > 0

    def watch_passes(self) -> PassesUnderWay | None:
        """Follow the passes of micro-batches through stages; None where batches are not cut."""
        accumulates = self.assembly.module.trainer.accumulate_grad_batches > 1
        return None if self.assembly.is_plain and not accumulates else PassesUnderWay(self.assembly.engine)

    def when_settled(self, call: Callable[[], object]) -> None:
        """Call when it is settled what this rank has: at once, or before the first batch of training is computed."""
        accumulates = self.assembly.module.trainer.accumulate_grad_batches > 1
        if self.assembly.engine.ownership is not None or (self.assembly.is_plain and not accumulates):
            call()
        else:
            self.assembly.when_settled.append(call)

    def gradient_norm(self, optimizer: Optimizer) -> Tensor:
        """2-norm of the gradients of the whole model; all ranks must call it, as in `on_before_optimizer_step`.

        Args:
            optimizer: Its parameters count, each once, wherever they are.

        Returns:
            A float64 scalar, equal on all ranks.
        """
        assert self.assembly.clipping is not None
        return self.assembly.clipping.norm(optimizer)

    def watch_gradients(self, optimizer: Optimizer) -> SmallGradients:
        """Take squares of the gradients of each micro-batch, from the next step on; its `remove` ends that.

        Args:
            optimizer: Its parameters count, each once.

        Raises:
            ValueError: If a micro-batch's gradient is nowhere whole, or not of that micro-batch alone.
        """
        return SmallGradients(self.assembly.engine, optimizer)

    def gradient_sums(self, watched: SmallGradients) -> tuple[GradientSums, bool]:
        """Sums over the micro-batches of the last batch of all replicas; all ranks must call it.

        Args:
            watched: What `watch_gradients` gave.

        Returns:
            sums: Of gradients of unscaled losses, with the weights that they have in the step's gradient.
            by_weight: Weights, and sizes, are those that `training_step` returned as `loss_weight`; the step's gradient
                is divided by the sum of its window's.
        """
        window = self.assembly.runner.window
        by_weight = window.weight > 0
        factor = (window.weight_unit if by_weight else 1.0) / window.loss_scale
        return watched.sums(factor, by_weight=by_weight), by_weight

    @property
    def last_gradient_norm(self) -> Tensor | None:
        """Norm before the last clipping by norm, equal on all ranks; None if nothing was clipped so far."""
        return self.clipping.last_norm if self.clipping is not None else None

    def timeline(self) -> list[Event]:
        """Measured times of the last step's actions on all ranks of this replica's pipeline; all ranks must call it.

        Set `record_timeline = True` before the step.
        """
        return self.assembly.engine.timeline()

    def measuring(self) -> AbstractContextManager[None]:
        """Context between steps in which a replica's parameters are whole, and backward passes are their caller's own.

        All replicas enter it together. A part of the model that is on another stage or tensor rank stays there.
        """
        return own_passes(self.assembly.engine.data)
