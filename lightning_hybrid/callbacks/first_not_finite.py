"""Finds out where numbers of a step stop being finite, on the way forward or back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, wraps
from types import TracebackType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_hybrid.compat import without_torch_function
from lightning_hybrid.functional.trees import leaves_of
from lightning_hybrid.parallel.gradients import local
from lightning_hybrid.parallel.ledgers.traffic import over_ranks

STEP = "training_step"
OUTPUT, GRADIENT, SUM = range(3)  # kinds of what can be found, in the order in which a step makes them


@dataclass(frozen=True, order=True)
class Found:
    """The first that is not finite, in the order of the fields.

    Attributes:
        kind: A module's output, the gradient of one in a backward pass, or the sum of a parameter's gradients.
        batch: Number of the batch within its accumulation window.
        micro_batch: Within the batch; 0 where batches are not cut.
        depth: Stage of the pipeline; its negative in backward passes, which begin at the last.
        order: Of what was looked at before it in the same pass.
        rank: Of the world.
        module: Its name; "training_step" if the loss is the first, "gradient of ..." where all outputs are finite.
    """

    kind: int
    batch: int
    micro_batch: int
    depth: int
    order: int
    rank: int
    module: str

    def shown(self, first: int) -> dict[str, Any]:
        """As columns, with the batch's number in the epoch, of which the window's first has number `first`.

        A sum over batches and ranks does not tell which of them it is from.
        """
        if self.kind == SUM:
            return {"module": self.module}
        return {
            "module": self.module,
            "rank": self.rank,
            "batch": first + self.batch,
            "micro_batch": self.micro_batch,
        }


class FirstNotFinite:
    """Context of a step in which every module's output, and its gradient, is looked at; waits for the device each time.

    Compiled modules run as they are written meanwhile. Torch's `detect_anomaly` names operations instead of modules,
    and looks at backward passes alone.

    Args:
        trainer: In `fit`.
        pl_module: Its module.
    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trainer, self._module = trainer, pl_module
        self._firsts: dict[int, Found] = {}
        self._pass: tuple[Any, ...] | None = None
        self._order = 0

    def __enter__(self) -> FirstNotFinite:
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            watch: Callable[[], Any] | None = getattr(self._trainer.strategy, "watch_passes", None)
            self._passes = watch() if watch is not None else None
            if self._passes is not None:
                stack.callback(self._passes.remove)
            for name, module in self._module.named_modules():
                if name:
                    stack.callback(module.register_forward_hook(partial(self._look, name)).remove)
            self._watch_step(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def found(self) -> Found | None:
        """The first over all ranks, which call it together, with the gradients of the step still there."""
        mine = min(self._firsts.values(), default=None) or self._sum()
        return min((each for each in over_ranks(mine) if each is not None), default=None)

    def _watch_step(self, stack: ExitStack) -> None:
        attributes, step = vars(self._module), self._module.training_step
        own = {name: attributes[name] for name in (STEP,) if name in attributes}  # torch.compile has left one there

        @wraps(step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            output = step(*args, **kwargs)
            self._look(STEP, self._module, None, output)
            return output

        attributes[STEP] = training_step
        stack.callback(attributes.update, own)
        stack.callback(attributes.pop, STEP)

    def _look(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        now = self._now()
        if now is None:
            return
        leaves = [leaf for leaf in leaves_of(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        self._note(OUTPUT, now, name, leaves)
        for leaf in leaves:
            if leaf.requires_grad:
                hook = leaf.register_hook(partial(self._look_back, now, f"gradient of {name}"))
                self._stack.callback(hook.remove)  # a parameter that is an output stays

    def _look_back(self, now: tuple[int, int, int], name: str, gradient: Tensor) -> None:
        batch, micro_batch, stage = now
        self._note(GRADIENT, (batch, micro_batch, -stage), name, [gradient])

    def _note(self, kind: int, now: tuple[int, int, int], name: str, tensors: Sequence[Tensor]) -> None:
        self._order = self._order + 1 if (kind, *now) == self._pass else 0
        self._pass = kind, *now
        found = Found(kind, *now, self._order, self._trainer.global_rank, name)
        if kind not in self._firsts or found < self._firsts[kind]:
            with without_torch_function():  # parts of tensors that the tensor axis deals out
                if not all(bool(local(tensor.detach()).isfinite().all()) for tensor in tensors):
                    self._firsts[kind] = found

    def _now(self) -> tuple[int, int, int] | None:
        batch = self._trainer.fit_loop.batch_idx % self._trainer.accumulate_grad_batches
        if self._passes is None:
            return batch, 0, 0
        now = self._passes.now
        return None if now is None else (batch, *now)

    def _sum(self) -> Found | None:
        held = getattr(self._trainer.strategy, "held_parameters", None)
        named = dict(self._module.named_parameters()) if held is None else held()
        for name, parameter in named.items():
            if parameter.grad is not None and not bool(local(parameter.grad).isfinite().all()):
                return Found(SUM, 0, 0, 0, 0, self._trainer.global_rank, f"gradient of {name}")
        return None
