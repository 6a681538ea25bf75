"""One rank's training engine: plans, schedules, gradients and ownership behind two calls, `train` and `evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.functional.lowering import lower
from lightning_hybrid.functional.schedules import Kind, choose, forward_only
from lightning_hybrid.parallel.data_parallel import broadcast_buffers, maxima
from lightning_hybrid.parallel.experts.balancing import Balancing
from lightning_hybrid.parallel.experts.parallel import ExpertParallel
from lightning_hybrid.parallel.holdings import Holdings
from lightning_hybrid.parallel.memory.passes import begin_pass
from lightning_hybrid.parallel.mesh import Mesh
from lightning_hybrid.parallel.pipeline.cut import StageCut
from lightning_hybrid.parallel.pipeline.executor import Event, Executor, Step, Work
from lightning_hybrid.parallel.pipeline.ownership import Ownership
from lightning_hybrid.parallel.pipeline.plan import Plan
from lightning_hybrid.parallel.pipeline.planner import Planner
from lightning_hybrid.parallel.pipeline.probe_run import ProbeRun
from lightning_hybrid.parallel.pipeline.run import Result, StageRun
from lightning_hybrid.parallel.streams import Streams
from lightning_hybrid.parallel.tensor.parallel import TensorParallel
from lightning_hybrid.parallel.zero.zero import Zero, dry_run


class Engine(Holdings):
    """Runs the user's steps over the stages of this rank.

    Args:
        root: The model, already cut.
        cut: The cut; None on a pipeline of one stage.
        mesh: Groups of this rank.
        schedule: "auto", "gpipe", "1f1b" or "interleaved_1f1b".
        num_chunks: Stages of each rank.
        zero: How states are sharded over the data axis.
        seed: Base of all random numbers drawn in steps; the same on every rank.
        tensor: What tensor parallelism has made of the model; None on a tensor axis of one rank.
        experts: What expert parallelism has made of it; None where experts are not split.

    Attributes:
        planner: Keeps plans; None on a pipeline of one stage.
        balancing: What layers count over the replicas.
        num_samples: Samples of this replica's last batch.
        seed: Base of all random numbers drawn in steps.
        observers: Each is given a training batch and its work, and returns the work to be done in its place.
    """

    def __init__(
        self,
        root: nn.Module,
        cut: StageCut | None,
        mesh: Mesh,
        *,
        schedule: str,
        num_chunks: int,
        zero: Zero,
        seed: int,
        tensor: TensorParallel | None = None,
        experts: ExpertParallel | None = None,
    ) -> None:
        super().__init__(root, cut, mesh, zero, tensor, experts)
        self.num_stages = mesh.layout.pipeline * num_chunks
        self.num_samples = 1
        self.executor = Executor(mesh, self.num_stages)
        self.seed = seed
        self.planner = Planner(cut, mesh, self._run_probe, self._around_probe) if cut is not None else None
        self._runs: dict[tuple[int, int], StageRun] = {}
        self.observers: list[Callable[[Step, Work], Work]] = []
        self._evaluation, self.balancing = ExitStack(), Balancing(root, mesh)
        size = mesh.layout.pipeline
        self._program = cache(lambda m: lower(choose(schedule, size, m, num_chunks), self.num_stages))
        self._forward_program = cache(lambda m: lower(forward_only(size, m, num_chunks), self.num_stages))

    def prepare(self, step: Step, *, training: bool) -> list[dict[int, Plan]]:
        """Plans of each micro-batch; structures and shapes not met before are probed."""
        if self.planner is None:
            return [{0: Plan(key)} for key in step.keys]
        with self.apart(step) if training else nullcontext():
            return self.planner.prepare(step, training=training)

    def apart(self, step: Step) -> AbstractContextManager[None]:
        """Context in which this replica's forward passes may differ from others'; all replicas enter it together.

        Args:
            step: What this replica is going to run; without keys if that is nothing.
        """
        new = self.planner is not None and not self.planner.knows(step)
        return self._apart(len(step.keys), wanted=new)

    @contextmanager
    def _apart(self, number: int, *, wanted: bool) -> Iterator[None]:
        with self.data.apart(number, wanted=wanted):
            if self.experts is None or self.experts.has_all or not self.experts.differ(number, wanted=wanted):
                yield
                return
            with self.data.whole(), self.experts.with_all():
                yield

    def spread(self, number: int) -> tuple[int, int]:
        """Least and most over the replicas, where all must run equally many passes; they call it together."""
        together = self.zero.stage >= 2 or self.experts is not None or self.balancing.in_passes
        if self.mesh.layout.data == 1 or not together:
            return number, number
        least, most = maxima(self.mesh, -number, number)
        return -least, most

    def watch(self, make_step: Callable[[], Step]) -> None:
        """See in a dry run what the first step to train reads, if that matters; a pipeline's probes see it by the way.

        Args:
            make_step: Makes a step whose records nobody looks at.
        """
        if self.reads is not None and self.cut is None:
            step = make_step()
            with self._surroundings(), self.balancing.uncounted(), dry_run(self.root, self.mesh.device, self.reads):
                if self._is_shared:
                    self._start_streams(step, 0)
                self.data.step(lambda: Result([], step.call(0)))

    def recheck(self, step: Step, *, training: bool) -> None:
        """Probe a batch again whose loss is NaN: it may have taken a path that no probe saw.

        Raises:
            RuntimeError: If a value of another stage was used.
        """
        if self.planner is not None:
            with self._apart(len(step.keys), wanted=True):
                self.planner.renew(step, training=training)
            self.data.scatter()  # the optimizer is about to change the shards

    def settle(self) -> Ownership | None:
        """After the first training probe: keep what this rank's stages read; None if that had been done before."""
        return self.keep(self.planner.needs if self.planner is not None else {})

    def train(
        self,
        step: Step,
        plans: list[dict[int, Plan]],
        *,
        seed: Callable[[int, Any], tuple[Tensor, float]],
        weight: Callable[[int], float | None],
        reduce: bool,
    ) -> None:
        """Run forward and backward of all micro-batches; `.grad` then holds their weighted sum.

        Args:
            step: The batch.
            plans: Its plans, from `prepare`.
            seed: For a micro-batch and the last stage's output, the scalar to differentiate and its weight.
            weight: Weight of a micro-batch where it does not depend on that output, else None.
            reduce: This batch ends an accumulation window: sum the gradients over replicas, tensor axis and holders.
                What accumulates on the host is summed over the replicas after each batch.
        """
        program = self._program(len(plans))[self.mesh.pipeline_rank]
        backwards = [(a.stage, a.micro_batch) for a in program if a.kind is Kind.BACKWARD]
        to_host = self.accumulation is not None
        if not self.in_window:
            self.balancing.start_window()
        self.in_window = False
        self.data.begin(backwards, reduce=reduce or to_host, hold=not reduce)
        self.note_trained()
        with self._surroundings():
            work = Work(
                program, plans, self._forward(step, plans), seed, weight, self.data.before_backward, self._forget
            )
            for observe in self.observers:
                work = observe(step, work)
            try:
                self.executor.run(work)
            except BaseException:
                self.data.abandon()
                raise
        with self.thawed() if reduce or to_host else nullcontext():
            self._sum(last=reduce)
        self.in_window = not reduce

    def _sum(self, *, last: bool) -> None:
        """Sum gradients after a batch, over the replicas and over whoever else has parts of them."""
        if last or self.accumulation is not None:
            self.data.finish()
        if self.accumulation is not None and not last:
            self.accumulation.take(self.local_parameters())
        if last:
            if self.accumulation is not None:
                self.accumulation.give_back()
            self.sum_deferred_gradients()
            if self.cut is not None and self.ownership is not None:
                self.ownership.sum_shared_gradients(self.cut)

    def evaluate(self, step: Step, plans: list[dict[int, Plan]], take: Callable[[int, Any], None]) -> None:
        """Run forward only; `take` gets each micro-batch's output on the last stage."""
        program = self._forward_program(len(plans))[self.mesh.pipeline_rank]
        forward = self._forward(step, plans)

        def forward_and_take(stage: int, micro_batch: int, payload: list[Tensor]) -> Result:
            result = forward(stage, micro_batch, payload)
            if stage == self.num_stages - 1:
                take(micro_batch, result.output)
            return result

        with self._surroundings():
            self.executor.run(Work(program, plans, forward_and_take))
        self._runs.clear()

    def run_whole(self, step: Step) -> Any:
        """Call a step that has one micro-batch and runs its own backward passes, on a pipeline of one stage."""
        with self._surroundings():
            begin_pass()
            if self._is_shared:
                self._start_streams(step, 0)
            return step.call(0)

    def prepare_evaluation(self, *, is_regular: bool) -> None:
        """Gather parameters, and give all replicas the buffers of the first, as its checkpoint has them.

        Args:
            is_regular: Each step calls the model as often as other replicas' do, so that stage 3 can gather on the way.
        """
        if self.zero.stage < 3 or not is_regular:
            self.data.gather()
        if self.experts is not None and not is_regular:
            self._evaluation.enter_context(self.experts.with_all())
        broadcast_buffers(self.root, self.mesh)

    def finish_evaluation(self) -> None:
        """Let go of gathered parameters."""
        self._evaluation.close()
        self.data.scatter()

    def timeline(self) -> list[Event]:
        """Measured times of the last step's actions on all ranks of this replica's pipeline, which call it together."""
        everyone: list[Any] = [None] * self.mesh.layout.pipeline
        dist.all_gather_object(everyone, self.executor.events, group=self.mesh.pipeline_group)
        return [event for other in everyone for event in other]

    def _forward(self, step: Step, plans: list[dict[int, Plan]]) -> Callable[[int, int, list[Tensor]], Result]:
        def forward(stage: int, micro_batch: int, payload: list[Tensor]) -> Result:
            begin_pass()
            if self._is_shared:
                self._start_streams(step, micro_batch)
            if self.cut is None:
                return self.data.step(lambda: Result([], step.call(micro_batch)))
            run = StageRun(self.cut, stage, plans[micro_batch][stage], payload)
            self._runs[stage, micro_batch] = run
            return self.data.step(lambda: run.run(lambda: step.call(micro_batch)))

        return forward

    def _run_probe(self, step: Step, index: int, run: ProbeRun) -> Result:
        begin_pass(trained=False)
        self._start_streams(step, index)
        return self.data.step(lambda: run.run(lambda: step.call(index)))

    @contextmanager
    def _around_probe(self) -> Iterator[None]:
        with self._shown(), self.balancing.uncounted(), self.reads or nullcontext():
            yield

    def _forget(self, stage: int, micro_batch: int) -> None:
        """After a backward pass nothing is recomputed any more."""
        run = self._runs.pop((stage, micro_batch), None)
        if run is not None:
            for key in run.filled:
                run.cut.keeper.filled.pop(key, None)

    @property
    def _is_shared(self) -> bool:
        """Whether other ranks run parts of the same batch, so that random numbers are derived from its name."""
        return self.mesh.layout.world_size > 1

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Context of a step."""
        with Streams(self.mesh.device) if self._is_shared else nullcontext(), self._shown():
            yield

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """Context in which modules show what a step sees: parameters in the type of compute, and as wholes."""
        with self.data.shown(), self.tensor.step() if self.tensor is not None else nullcontext():
            yield

    def _start_streams(self, step: Step, micro_batch: int) -> None:
        Streams(self.mesh.device).seed(self.seed, *step.stream(micro_batch), self.mesh.data_rank)
