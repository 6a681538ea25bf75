"""Training and evaluation steps: micro-batches, weights, losses and records around one run of the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_hybrid.parallel.engine import Engine
from lightning_hybrid.parallel.gradients import divide_gradients
from lightning_hybrid.parallel.pipeline.executor import Step
from lightning_hybrid.parallel.pipeline.microbatch import structure_key
from lightning_hybrid.parallel.tensor.parallel import whole_tree
from lightning_hybrid.strategies.losses import (
    LOSS,
    Counts,
    Shares,
    Turn,
    Window,
    check_loss,
    loss_of,
    refusing_all_gather,
    warn_of_dropped,
)
from lightning_hybrid.strategies.metric_objects import MetricObjects
from lightning_hybrid.strategies.predictions import gather_predictions, share_of
from lightning_hybrid.strategies.records import Exchange, Key, Recorder, outputs, replay
from lightning_hybrid.strategies.signals import signals_of
from lightning_hybrid.strategies.splitting import Split, Splitter, streams_of

Context = Callable[[], AbstractContextManager[Any]]

MAX_RECHECKS = 3  # losses of NaN that are looked into; after that the training has simply diverged


@dataclass
class StepRunner:
    """Runs the LightningModule's steps over an engine.

    Args:
        module: The user's module.
        engine: The engine.
        metrics: Its metric objects.
        splitter: Cuts batches into micro-batches.
        window: What is known of the accumulation window.
    """

    module: LightningModule
    engine: Engine
    metrics: MetricObjects
    splitter: Splitter
    window: Window = field(default_factory=Window)
    _exchanges: dict[str, Exchange] = field(default_factory=dict)
    _rechecks: int = 0
    _dropped: set[str] = field(default_factory=set)
    _whole: dict[str, Any] | None = None  # what the step returned besides scalars, where one step sees the whole batch

    def train(
        self,
        args: Sequence[Any],
        context: Context,
        turn: Turn,
        *,
        name: tuple[object, ...],
        on_planned: Callable[[], None],
    ) -> Tensor | dict[str, Any]:
        """One training batch, forward and backward.

        Args:
            args: Of `training_step`; the first is the batch.
            context: Entered around each call of the user's step.
            turn: The batch's place in its accumulation window.
            name: What random numbers are derived from.
            on_planned: Called between the probes and the schedule.

        Returns:
            What the user's step returned, combined over micro-batches and replicas, equal on all ranks.
        """
        split = self._split(args[0], "training_step")
        recorder, counts = self._recorder(), Counts()
        share = Shares(self.engine.mesh, split.sizes, turn, [number for number, _ in split.places])
        step = self._step("training_step", split, args, context, recorder, name)
        self.engine.watch(lambda: self._step("training_step", split, args, context, self._recorder(), name))
        plans = self.engine.prepare(step, training=True)
        on_planned()
        weighted = bool(plans) and all(plan.weighted for of_stage in plans for plan in of_stage.values())
        self.engine.train(
            step,
            plans,
            seed=partial(self._seed, counts, recorder, share, turn),
            weight=(lambda _: None) if weighted else share,
            reduce=turn.last,
        )
        trainer, signals = self.module.trainer, signals_of(self.module.trainer)
        own = self.engine.mesh.tensor_rank == 0  # others run the same micro-batches
        # the step may ask to stop, on any stage
        sums = [counts.weighted * own, counts.plain * own, *signals.wishes(trainer)]
        combined, totals = self._exchange("training_step").combine(recorder.entries, sums)
        weight = next((w for key, (_, w) in combined.items() if (key.kind, key.name) == ("output", LOSS)), 0.0)
        num_weighted, num_plain, *wishes = totals
        signals.grant(trainer, wishes)
        self.window.add(num_weighted, num_plain, weight, turn)
        if turn.last and num_weighted:
            divide_gradients(self.engine.local_parameters(), self.window.weight / turn.weight_unit)
        values: dict[str, Any] = outputs(combined)
        if turn.last and self._rechecks < MAX_RECHECKS and LOSS in values and bool(values[LOSS].isnan()):
            self._rechecks += 1
            self.engine.recheck(step, training=True)
        self._replay(combined, on_step=True)
        values.setdefault(LOSS, torch.zeros((), device=self.engine.mesh.device))
        values |= self._whole or {}
        return values if len(values) > 1 else values[LOSS]

    def train_by_hand(self, args: Sequence[Any], context: Context, shares: Shares, *, name: tuple[object, ...]) -> Any:
        """One training batch of a module that optimizes manually: its own backward passes and steps, uncut.

        Returns:
            What the user's step returned, with scalars combined over the replicas.
        """
        recorder, samples = self._recorder(), shares.sizes[0]
        self.engine.num_samples = samples
        step = self._step("training_step", Split([args[0]], [samples]), args, context, recorder, name)
        self._whole = {}
        self._record_outputs(recorder, self.engine.run_whole(step), samples)
        combined = self._heed_signals("training_step", recorder)
        self._replay(combined, on_step=True)
        values = {**outputs(combined), **self._whole}
        return values.pop("") if "" in values else values or None

    def evaluate(
        self, hook: str, args: Sequence[Any], context: Context, *, name: tuple[object, ...], counts: bool
    ) -> Tensor | dict[str, Any] | None:
        """One validation or test batch, forward only.

        Args:
            hook: "validation_step" or "test_step".
            args: Of the hook; the first is the batch.
            context: Entered around each call of the user's step.
            name: What random numbers are derived from.
            counts: False where the replica has no more data: the batch is not run, and weighs nothing.
        """
        recorder = self._recorder()
        self.engine.num_samples = 0
        split = self._split(args[0], hook) if counts else Split()
        step = self._step(hook, split, args, context, recorder, name)
        with self.engine.apart(step):
            if counts:
                plans = self.engine.prepare(step, training=False)
                self.engine.evaluate(
                    step, plans, lambda i, output: self._record_outputs(recorder, output, split.sizes[i])
                )
        combined = self._heed_signals(hook, recorder)
        self._replay(combined, on_step=False)
        values = {**outputs(combined), **((self._whole or {}) if counts else {})}
        return values.pop("") if "" in values else values or None

    def predict(
        self,
        args: Sequence[Any],
        context: Context,
        *,
        name: tuple[object, ...],
        counts: bool,
        indices: list[int] | None,
    ) -> tuple[Any, list[int] | None]:
        """Predictions for one batch of all replicas, and the numbers of its samples in the dataset, on every rank.

        Args:
            args: Of `predict_step`; the first is the batch.
            context: Entered around each call of the user's step.
            name: What random numbers are derived from.
            counts: False where the replica has no more data.
            indices: Numbers of this replica's samples, if known.
        """
        recorder, outputs = self._recorder(), dict[int, Any]()
        split = self._split(args[0], "predict_step") if counts else Split()
        step = self._step("predict_step", split, args, context, recorder, name)
        with self.engine.apart(step):
            if counts:
                plans = self.engine.prepare(step, training=False)
                self.engine.evaluate(step, plans, outputs.__setitem__)
        own = share_of([outputs[i] for i in range(len(split.sizes))], split.sizes, indices) if outputs else None
        if own is not None and recorder.entries:
            own.value = ValueError(
                f"predict_step logs {next(iter(recorder.entries)).name!r}: Lightning has no log then."
            )
        predictions = gather_predictions(self.engine.mesh, own)
        self._heed_signals("predict_step")
        return predictions

    def _split(self, batch: Any, hook: str) -> Split:
        split = self.splitter.split(batch, hook)
        self._whole = {} if self.engine.mesh.layout.pipeline == 1 and len(split.parts) == 1 else None
        return split

    def _step(
        self,
        hook: str,
        split: Split,
        args: Sequence[Any],
        context: Context,
        recorder: Recorder,
        name: tuple[object, ...],
    ) -> Step:
        function, parts, sizes = getattr(self.module, hook), split.parts, split.sizes

        def call(micro_batch: int) -> Any:
            together = self.engine.cut is None and len(parts) == 1  # all ranks are in the same step at the same time
            gathering = nullcontext() if together else refusing_all_gather(self.module)
            with recorder.recording(sizes[micro_batch]), gathering, context():
                output = whole_tree(function(parts[micro_batch], *args[1:]))
            if hook == "training_step" and self.module.automatic_optimization:
                check_loss(output)  # in the probe already, where all ranks hear of it
            return output

        mode = (hook, self.module.training, torch.is_grad_enabled())
        keys = [(mode, structure_key(part)) for part in parts]
        return Step((hook, *name), keys, call, sizes, [(hook, *stream) for stream in streams_of(split, name)])

    def _recorder(self) -> Recorder:
        cut = self.engine.cut
        return Recorder(self.module, cut.keeper if cut else None, self.engine.mesh.device)

    def _exchange(self, hook: str) -> Exchange:
        mesh = self.engine.mesh
        return self._exchanges.setdefault(hook, Exchange(mesh.device, counts=mesh.tensor_rank == 0))

    def _heed_signals(self, hook: str, recorder: Recorder | None = None) -> dict[Key, tuple[Tensor, float]]:
        """What all ranks have recorded; the exchange also tells whether any of them wants to stop or leave."""
        trainer, signals = self.module.trainer, signals_of(self.module.trainer)
        entries = recorder.entries if recorder is not None else {}
        combined, wishes = self._exchange(hook).combine(entries, signals.wishes(trainer))
        signals.grant(trainer, wishes)
        return combined

    def _replay(self, combined: Mapping[Key, tuple[Tensor, float]], *, on_step: bool) -> None:
        self.metrics.finish_step(combined, on_step=on_step)
        replay(self.module, combined)

    def _seed(
        self, counts: Counts, recorder: Recorder, share: Shares, turn: Turn, micro_batch: int, output: Any
    ) -> tuple[Tensor, float]:
        loss, weight = loss_of(output)
        counts.weighted += weight is not None
        counts.plain += weight is None
        key = Key("output", LOSS, dtype=loss.dtype)
        recorder.add(key, loss.detach(), float(share.sizes[micro_batch]) if weight is None else weight)
        if isinstance(output, Mapping):
            rest = {name: value for name, value in output.items() if name not in (LOSS, "loss_weight")}
            self._record_outputs(recorder, rest, share.sizes[micro_batch])
        return loss, share(micro_batch) if weight is None else turn.weigh(weight)

    def _record_outputs(self, recorder: Recorder, output: Any, samples: int) -> None:
        entries = output if isinstance(output, Mapping) else {"": output}
        for name, value in entries.items():
            if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point():
                key = Key("output", str(name), dtype=value.dtype)
                recorder.add(key, value.detach().reshape(()), float(samples))
            elif self._whole is not None:
                self._whole[name] = value
            elif value is not None and name not in self._dropped:
                self._dropped.add(str(name))
                mesh = self.engine.mesh
                if mesh.data_rank == mesh.tensor_rank == 0:  # only the last stage knows, which is never global rank 0
                    warn_of_dropped(str(name), value)
