"""One micro-batch through one stage: the user's whole step, with the blocks of other stages answered for.

Blocks of earlier stages return empty tensors of the right geometry. At the first owned block the ones that matter are
filled in place with what was received, so that any Python variable of the user's code that holds such a tensor holds
the true value from then on. The first block of the next stage ends the step with an exception that carries its
arguments out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hybrid.compat import is_view, storage_key, version
from lightning_hybrid.functional.trees import flatten, leaves_of, unflatten
from lightning_hybrid.parallel.ledgers.fates import Kept
from lightning_hybrid.parallel.memory.hooks import ChainedHooks, Packed
from lightning_hybrid.parallel.tensor.split_tensor import whole

if TYPE_CHECKING:
    from lightning_hybrid.parallel.pipeline.cut import StageCut
    from lightning_hybrid.parallel.pipeline.gates import Gate
    from lightning_hybrid.parallel.pipeline.plan import Call, Plan


class StageExit(BaseException):
    """Leaves the user's step at the first block of the next stage, past any `except Exception`."""

    def __init__(self, arguments: list[Any]) -> None:
        super().__init__()
        self.arguments = arguments


@dataclass(frozen=True)
class Result:
    """Outcome of one run: the payload for the next stage, or on the last stage what the step returned."""

    payload: list[Tensor]
    output: Any = None


class _ToBeFilled(Kept):
    """What was saved before the stage's entry, and may have been written to there."""

    def __init__(self, tensor: Tensor, version: int, filled: Container[int]) -> None:
        super().__init__(tensor, version)
        self._filled = filled

    @override
    def unpack(self) -> Tensor:
        return self.tensor if storage_key(self.tensor) in self._filled else super().unpack()


class StageRun:
    """Runs the user's step once as stage `stage`.

    Args:
        cut: The cut that the stage belongs to.
        stage: Global number of the stage.
        plan: What the probe learned for this stage and this structure of inputs.
        payload: Received tensors, one for each of `plan.entry`.
    """

    is_probe = False

    def __init__(self, cut: StageCut, stage: int, plan: Plan, payload: Sequence[Tensor]) -> None:
        self.cut, self.stage, self.plan, self.payload = cut, stage, plan, payload
        self.blocks = cut.blocks_of_stage(stage)
        self.is_last = self.blocks.stop == len(cut.blocks)
        self.expected = 0  # position of the block whose turn it is
        self._calls: Counter[str] = Counter()
        self.filled: list[int] = []

    @property
    def entered(self) -> bool:
        """Whether what the step now computes belongs to this stage: earlier stages have done what came before."""
        return self.stage == 0 or self.expected > self.blocks.start

    def run(self, step: Callable[[], Any]) -> Result:
        """Call `step` and return its outcome.

        Raises:
            RuntimeError: If the step does not call each block once, in order.
        """
        self.cut.keeper.active = self
        try:
            with self._saving():
                output = step()
        except StageExit as exit:
            return Result(self._leave(exit.arguments))
        finally:
            self.cut.keeper.active = None
        if self.expected != len(self.cut.blocks):
            raise RuntimeError(
                f"The step ended without calling {self.cut.blocks[self.expected]}. Under a pipeline each block must be "
                "called once in every step; a conditional layer belongs inside a block."
            )
        return Result([], output)

    def call(self, gate: Gate, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer the call of a gated module (see `gates.Run`)."""
        if gate.position is None:
            call = gate.name, self._calls[gate.name]
            self._calls[gate.name] += 1
            if call in self.plan.gated:
                return self.absent(gate, call, args, kwargs)
            return self.present(gate, call, proceed, args, kwargs)
        self._check_order(gate, gate.position)
        self.expected += 1
        if gate.position >= self.blocks.stop:
            raise StageExit([whole(leaf) for leaf in leaves_of((args, kwargs))])
        call = gate.name, 0
        if gate.position < self.blocks.start:
            return self.absent(gate, call, args, kwargs)
        if gate.position == self.blocks.start and self.stage > 0:
            args, kwargs = self._enter(args, kwargs)
        return self.owned(gate, call, proceed, args, kwargs)

    def absent(self, gate: Gate, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer for a call whose value this stage does not need to know."""
        output = self.plan.outputs[call]
        if output.random:
            self.cut.keeper.draw_seed()
        return output.make(self.cut.device)

    def present(
        self, gate: Gate, call: Call, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a module outside the blocks."""
        return self._proceed(call, proceed, args, kwargs)

    def owned(
        self, gate: Gate, call: Call, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a block of this stage."""
        return self._proceed(call, proceed, args, kwargs)

    def observe(self, value: object, reader: str) -> None:
        """Say that a value matters; only a probe listens."""

    def fill(self, index: int, leaf: object, received: Tensor) -> Any:
        """Put a received tensor where the step holds an empty one; returns what the block's argument is to be."""
        if not isinstance(leaf, Tensor) or leaf.shape != received.shape:
            shape = list(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise RuntimeError(
                f"{self.cut.blocks[self.blocks.start]} takes {shape} where stage {self.stage - 1} sent "
                f"{list(received.shape)}: shapes must depend on the shapes of the batch only, not on its values."
            )
        if index in self.plan.replaced:
            return received
        fill_in_place(leaf, received)
        if self.plan.checkpointed:
            self.filled.append(storage_key(leaf))
            self.cut.keeper.filled[storage_key(leaf)] = leaf.untyped_storage(), received.requires_grad
        return leaf

    def _saving(self) -> AbstractContextManager[Any]:
        """An activation checkpoint around the entry block saves its inputs before they are filled, which is right."""
        return ChainedHooks(self._pack) if self.plan.checkpointed else nullcontext()

    def _pack(self, tensor: Tensor) -> Packed | None:
        return None if self.entered else _ToBeFilled(tensor.detach(), version(tensor), self.cut.keeper.filled)

    def _proceed(self, call: Call, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = self.plan.outputs.get(call)
        if output is not None and output.random:
            return self.cut.keeper.draw(proceed, args, kwargs)
        return proceed(*args, **kwargs)

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves, node = flatten((args, kwargs))
        filled = {
            i: self.fill(i, leaves[i], received) for i, received in zip(self.plan.entry, self.payload, strict=True)
        }
        if not self.plan.replaced:
            return args, kwargs
        rebuilt: tuple[tuple[Any, ...], dict[str, Any]] = unflatten(
            [filled.get(i, leaf) for i, leaf in enumerate(leaves)], node
        )
        return rebuilt

    def _leave(self, arguments: list[Any]) -> list[Tensor]:
        payload = [arguments[i] for i in self.plan.exit]
        for tensor, spec in zip(payload, self.plan.sent, strict=True):
            if tensor.shape != spec.shape or tensor.dtype != spec.dtype or tensor.requires_grad != spec.requires_grad:
                raise RuntimeError(
                    f"{self.cut.blocks[self.blocks.stop]} is given {list(tensor.shape)} {tensor.dtype} "
                    f"requires_grad={tensor.requires_grad}, and in the probe of the same input shapes it was "
                    f"{list(spec.shape)} {spec.dtype} requires_grad={spec.requires_grad}. What crosses a stage "
                    "boundary may depend on the shapes of the batch, not on its values, and parameters may not be "
                    "frozen or unfrozen between steps."
                )
        return payload

    def _check_order(self, gate: Gate, position: int) -> None:
        if position == self.expected:
            return
        if position < self.expected:
            raise RuntimeError(
                f"{gate.name} was called twice in one step (the block called last was "
                f"{self.cut.blocks[self.expected - 1]}). A pipeline runs each block once for each micro-batch: call "
                "the model once in the step, on one concatenated input if need be."
            )
        raise RuntimeError(
            f"{gate.name} was called when {self.cut.blocks[self.expected]} was expected: the blocks must be called in "
            "the order of registration. Name the lists in the order of their use with pipeline_layers=[...]."
        )


def fill_in_place(dummy: Tensor, received: Tensor) -> None:
    """Give `dummy`, and all variables and views that share its memory, the value and gradient of `received`.

    Raises:
        RuntimeError: If autograd cannot write into it: one of several views, or an expanded tensor.
    """
    if dummy.requires_grad and not is_view(dummy):
        dummy.detach_()  # what empty tensors were computed from has no gradient
    with torch.set_grad_enabled(received.requires_grad):
        dummy.copy_(received)
