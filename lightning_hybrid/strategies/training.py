"""One training batch between Lightning's hooks, which zero the gradients after the step and ask for them afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch.plugins import Precision
from torch import Tensor

from lightning_hybrid.compat import is_accumulating
from lightning_hybrid.parallel.engine import Engine
from lightning_hybrid.parallel.gradients import average_gradients, install_gradients, take_gradients
from lightning_hybrid.parallel.mesh import Mesh
from lightning_hybrid.parallel.pipeline.microbatch import batch_size
from lightning_hybrid.strategies.assembly import Assembly
from lightning_hybrid.strategies.losses import Shares, Turn
from lightning_hybrid.strategies.precisions import Masters


class Training:
    """Runs forward and backward in `training_step`, and keeps the gradients until `backward` installs them.

    Attributes:
        taken: (parameter, gradient) of the last step, until they are installed.
        has_run: A step has run, and its gradients are not installed yet.
    """

    def __init__(self) -> None:
        self.taken: list[Any] = []
        self.has_run = self._has_averaged = False

    def step(self, assembly: Assembly, precision: Precision, args: Sequence[Any], *, record: bool) -> Any:
        """Run one batch.

        Args:
            assembly: What runs it.
            precision: Its context surrounds the user's step.
            args: Of `training_step`.
            record: Measure the times of the schedule's actions.

        Returns:
            What `training_step` returned, combined over micro-batches and replicas.
        """
        trainer, engine = assembly.module.trainer, assembly.engine
        turn = self._turn(assembly, precision, args[0])
        batch_idx = trainer.fit_loop.batch_idx + 1 - turn.count  # of the first, if several are joined
        if turn.first:
            engine.forget_gradients()  # of a window that was never applied
        if batch_idx == 0 and engine.planner is not None:
            engine.planner.heed_frozen()

        def on_planned() -> None:
            assembly.settle()
            resumed, assembly.resumed = assembly.resumed, None
            if resumed is not None:
                resumed.restore(engine, assembly.runner.window, turn)

        self.has_run = True
        engine.executor.record = record
        output = assembly.runner.train(
            args,
            precision.train_step_context,
            turn,
            name=(trainer.current_epoch, batch_idx),
            on_planned=on_planned,
        )
        self.taken = take_gradients(engine.local_parameters())
        if turn.last and isinstance(precision, Masters):
            precision.heed_weight(assembly.runner.window.weight)
        return output

    @staticmethod
    def _turn(assembly: Assembly, precision: Precision, batch: Any) -> Turn:
        trainer = assembly.module.trainer
        accumulate = trainer.accumulate_grad_batches
        count = len(assembly.runner.splitter.joined) or 1
        index = (trainer.fit_loop.batch_idx + 1 - count) % accumulate  # 0 when Lightning zeroes gradients too
        scale, unit = 1.0, 1.0
        if isinstance(precision, Masters):
            scale, unit = precision.loss_scale, precision.unit_of(batch)
        return Turn(accumulate, index, not is_accumulating(trainer), scale, unit, count)

    def step_by_hand(self, assembly: Assembly, precision: Precision, args: Sequence[Any]) -> Any:
        """Run one batch of a module that optimizes manually."""
        trainer, mesh = assembly.module.trainer, assembly.engine.mesh
        self._shares = Shares(mesh, [batch_size(args[0])], Turn())
        name = (trainer.current_epoch, trainer.fit_loop.batch_idx)
        return assembly.runner.train_by_hand(args, precision.train_step_context, self._shares, name=name)

    def backward_by_hand(self, engine: Engine, loss: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """One manual backward pass: sum the parts of gradients over the tensor axis, and average over the replicas.

        Args:
            engine: The engine.
            loss: What to differentiate.
            run: Runs autograd.
        """
        earlier = take_gradients(engine.deferred_parameters())  # summed before
        loss = run(self.weigh(loss, engine.mesh))
        engine.sum_deferred_gradients()
        install_gradients(earlier)
        if engine.mesh.layout.data > 1:
            average_gradients(engine.local_parameters(), engine.mesh.data_group)
        self._has_averaged = True
        return loss

    def checked(self, closure: Callable[[], Any], engine: Engine) -> Callable[[], Any]:
        """A manual step's closure, which may hold its backward passes, with a check between them and the update."""

        def and_check() -> Any:
            result = closure()
            self._check_averaged(engine)
            return result

        return and_check

    def _check_averaged(self, engine: Engine) -> None:
        """Refuse a manual step whose backward passes went past the strategy.

        Raises:
            RuntimeError: If gradients were never averaged over the replicas, or summed over the tensor axis.
        """
        replicas = engine.mesh.layout.data
        if not self._has_averaged and (replicas > 1 or engine.deferred_parameters()):
            each = f"each of the {replicas} replicas" if replicas > 1 else "each rank of the tensor axis"
            raise RuntimeError(
                "optimizer.step() was called and self.manual_backward(loss) never was: loss.backward() leaves "
                f"{each} with gradients of its own. Call self.manual_backward(loss)."
            )

    def weigh(self, loss: Tensor, mesh: Mesh) -> Tensor:
        """A loss of a manual step, such that its mean over the replicas gives each sample the same weight."""
        return loss * (self._shares(0) * mesh.layout.data)

    def install(self) -> None:
        """Give the optimizer what the last step took away from `zero_grad`."""
        install_gradients(self.taken)
        self.taken, self.has_run = [], False
