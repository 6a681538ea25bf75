"""Finds out where numbers of a step stop being finite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from types import TracebackType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_hybrid.compat import without_torch_function
from lightning_hybrid.functional.trees import leaves_of
from lightning_hybrid.parallel.gradients import local
from lightning_hybrid.parallel.ledgers.traffic import over_ranks

STEP = "training_step"


@dataclass(frozen=True, order=True)
class Found:
    """The first output that is not finite, in the order of the fields.

    Attributes:
        batch: Number of the batch within its accumulation window.
        micro_batch: Within the batch; 0 where batches are not cut.
        stage: Of the pipeline.
        order: Outputs before it in the same pass.
        rank: Of the world.
        module: Its name; "training_step" if the loss is the first, "gradient of ..." where all outputs are finite.
    """

    batch: int
    micro_batch: int
    stage: int
    order: int
    rank: int
    module: str

    def shown(self, first: int) -> dict[str, Any]:
        """As columns, with the batch's number in the epoch, of which the window's first has number `first`."""
        place = {"batch": first + self.batch, "micro_batch": self.micro_batch} if self.order >= 0 else {}
        return {"module": self.module, "rank": self.rank, **place}


class FirstNotFinite:
    """Context of a step in which every module's output is looked at, which waits for the device each time.

    Torch's `detect_anomaly` looks at backward passes, and names operations instead of modules.

    Args:
        trainer: In `fit`.
        pl_module: Its module.
    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trainer, self._module = trainer, pl_module
        self._handles: list[RemovableHandle] = []
        self._first: Found | None = None
        self._pass: tuple[int, int, int] | None = None
        self._order = 0

    def __enter__(self) -> FirstNotFinite:
        watch: Callable[[], Any] | None = getattr(self._trainer.strategy, "watch_passes", None)
        self._passes = watch() if watch is not None else None
        for name, module in self._module.named_modules():
            if name:
                self._handles.append(module.register_forward_hook(partial(self._look, name)))
        step = self._module.training_step

        @wraps(step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            output = step(*args, **kwargs)
            self._look(STEP, self._module, None, output)
            return output

        vars(self._module)["training_step"] = training_step
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del vars(self._module)["training_step"]
        for handle in self._handles:
            handle.remove()
        if self._passes is not None:
            self._passes.remove()

    def found(self) -> Found | None:
        """The first over all ranks, which call it together, with the gradients of the step still there."""
        found = [each for each in over_ranks(self._first or self._gradient()) if each is not None]
        outputs = [each for each in found if each.order >= 0]
        return min(outputs or found, default=None)

    def _look(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        now = self._now()
        if now is None:
            return
        self._order = self._order + 1 if now == self._pass else 0
        self._pass = now
        leaves = (leaf for leaf in leaves_of(output) if isinstance(leaf, Tensor) and leaf.is_floating_point())
        found = Found(*now, self._order, self._trainer.global_rank, name)
        if self._first is None or found < self._first:
            with without_torch_function():  # parts of tensors that the tensor axis deals out
                if not all(bool(local(leaf.detach()).isfinite().all()) for leaf in leaves):
                    self._first = found

    def _now(self) -> tuple[int, int, int] | None:
        batch = self._trainer.fit_loop.batch_idx % self._trainer.accumulate_grad_batches
        if self._passes is None:
            return batch, 0, 0
        now = self._passes.now
        return None if now is None else (batch, *now)

    def _gradient(self) -> Found | None:
        held = getattr(self._trainer.strategy, "held_parameters", None)
        named = dict(self._module.named_parameters()) if held is None else held()
        for name, parameter in named.items():
            if parameter.grad is not None and not bool(local(parameter.grad).isfinite().all()):
                return Found(0, 0, 0, -1, self._trainer.global_rank, f"gradient of {name}")
        return None
