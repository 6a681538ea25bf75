"""A dry run of one stage that follows every value, and finds out what must cross to the next stage."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from lightning_hybrid.compat import is_view, version
from lightning_hybrid.functional.trees import flatten, leaves_of
from lightning_hybrid.parallel.pipeline.auxiliary import auxiliary_listener
from lightning_hybrid.parallel.pipeline.cut import StageCut
from lightning_hybrid.parallel.pipeline.gates import Gate
from lightning_hybrid.parallel.pipeline.plan import Call, Needs, Output, Plan, TensorSpec
from lightning_hybrid.parallel.pipeline.provenance import LIVE, AbsentValueError, Provenance, tensors_of
from lightning_hybrid.parallel.pipeline.run import Result, StageRun, fill_in_place

CHECKPOINTS = {CheckpointFunction.forward.__code__, inspect.unwrap(checkpoint).__code__}
RECORDING_FLAGS = ("output_hidden_states", "output_attentions", "output_router_logits")


class ProbeRun(StageRun):
    """Runs the step under `Provenance` and completes `plan`.

    Attributes:
        needs: What this stage uses outside the blocks.
        read_buffers: Buffers outside the blocks whose values from before the step matter.
        num_arguments: Leaves among the arguments of the next stage's first block.
    """

    is_probe = True

    def __init__(
        self, cut: StageCut, stage: int, plan: Plan, payload: Sequence[Tensor], *, num_arguments: int, training: bool
    ) -> None:
        super().__init__(cut, stage, plan, payload)
        self.training = training
        self._num_received = num_arguments
        self.num_arguments = 0
        self.provenance = Provenance()
        self.needs = Needs()
        self.read_buffers: set[str] = set()
        self._need = 0
        self._held: dict[int, str] = {}
        self._buffers: dict[int, str] = {}
        self._calls_made: dict[int, Call] = {}
        self._absent: dict[str, int] = {}
        self._checkpoints: dict[FrameType, tuple[str, int]] = {}

    def run(self, step: Callable[[], Any]) -> Result:
        """Run and complete the plan."""
        self._tag_parameters()
        hooks = self._watch_recording_flags()
        try:
            with self.cut.listed(), uncompiled(), self.provenance, auxiliary_listener(self._note_auxiliary_loss):
                result = super().run(step)
                self.observe(result.output, "The value that the step returns")
        finally:
            self._checkpoints.clear()
            for hook in hooks:
                hook.remove()
        self._need |= self.provenance.read
        self.plan.gated = frozenset(call for bit, call in self._calls_made.items() if not self._need & bit)
        self.needs.parameters = {name for bit, name in self._held.items() if self._need & bit}
        self.needs.modules = {call[0] for bit, call in self._calls_made.items() if self._need & bit}
        self.read_buffers = {name for bit, name in self._buffers.items() if self._need & bit}
        return result

    def call(self, gate: Gate, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As in any run, unless an activation checkpoint holds blocks of two stages."""
        if gate.position is not None and self.training:
            self._refuse_wide_checkpoint(gate.name, self.cut.stage_of_block(gate.position))
        return super().call(gate, proceed, args, kwargs)

    def absent(self, gate: Gate, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer with tensors that are marked as unknown."""
        if call not in self.plan.outputs:
            raise AbsentValueError(
                f"{call[0]} is called on a path that no earlier run took, and its parameters have been released on "
                f"stage {self.stage}. Call the model once in a step, and take every path in the first training step or "
                "in the validation before it. What calls the model again and again, such as generate, needs "
                "pipeline_parallel_size=1, to which a checkpoint of this run can be taken."
            )
        self._refuse_reentrant(gate)
        value = super().absent(gate, call, args, kwargs)
        bit = self._absent_bit(gate.name)
        for tensor in tensors_of(value):
            self.provenance.set(tensor, bit)
        arguments = leaves_of((args, kwargs))
        for index in self.plan.outputs[call].written:
            self.provenance.set(arguments[index], bit)
        return value

    def present(
        self, gate: Gate, call: Call, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a module outside the blocks and remember which values came from it; a released one is absent."""
        if not gate.owned:
            return self.absent(gate, call, args, kwargs)
        value = self._record(gate, call, proceed, args, kwargs)
        bit = self.provenance.sources.add(f"call {call}")
        self._calls_made[bit] = call
        self.provenance.add(tensors_of(value), bit)
        if self.entered and not self.provenance.union(value) & self.provenance.sources.absent:
            self._need |= self.provenance.union(value) | bit  # for its side effects: no other stage has them true
        return value

    def owned(
        self, gate: Gate, call: Call, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a block of this stage: what it reads matters, and what it returns is alive."""
        self._refuse_reentrant(gate)
        self.observe((args, kwargs), gate.name)
        value = self._record(gate, call, proceed, args, kwargs)
        self.provenance.add(tensors_of(value), LIVE)
        return value

    def observe(self, value: object, reader: str) -> None:
        """Refuse a value that comes from another stage; note which parameters and calls it comes from."""
        for tensor in tensors_of(value):
            tag = self.provenance.of(tensor)
            self.provenance.refuse_absent(tag, reader)
            self._need |= tag

    def _note_auxiliary_loss(self) -> None:
        self.plan.auxiliary = True

    def fill(self, index: int, leaf: object, received: Tensor) -> Any:
        """Fill in place where that is possible; note where it is not."""
        if isinstance(leaf, Tensor) and leaf.shape == received.shape:
            whole = leaf.untyped_storage().nbytes() == leaf.numel() * leaf.element_size()
            try:
                if not whole or (leaf.requires_grad and is_view(leaf)):
                    raise RuntimeError  # the rest of its memory, or its old gradient, stays unknown
                fill_in_place(leaf, received)
            except RuntimeError:
                self.plan.replaced |= {index}
            self.provenance.set(received if index in self.plan.replaced else leaf, LIVE)
        if index in self.plan.replaced:
            return received
        return (
            leaf if isinstance(leaf, Tensor) and leaf.shape == received.shape else super().fill(index, leaf, received)
        )

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if len(leaves_of((args, kwargs))) != self._num_received:
            raise RuntimeError(
                f"{self.cut.blocks[self.blocks.start]} is called with other arguments on stage {self.stage} than on "
                f"stage {self.stage - 1}. What a step does before a block may not depend on values of earlier blocks."
            )
        self.plan.checkpointed = self.training and bool(_checkpoints())
        entered = super()._enter(args, kwargs)
        if self.plan.checkpointed and self.plan.replaced:
            raise RuntimeError(
                f"{self.cut.blocks[self.blocks.start]} runs under activation checkpointing and is given views of "
                "a tensor of an earlier stage, which cannot be recomputed. Pass it whole tensors, or checkpoint inside "
                "the block."
            )
        return entered

    def _leave(self, arguments: list[Any]) -> list[Tensor]:
        reader = self.cut.blocks[self.blocks.stop]
        self.num_arguments = len(arguments)
        exit, sources = [], LIVE | sum(self._held)
        parameters = {id(parameter) for parameter in self.cut.root.parameters()}
        for index, leaf in enumerate(arguments):
            if isinstance(leaf, Tensor) and id(leaf) not in parameters:
                tag = self.provenance.of(leaf)
                self.provenance.refuse_absent(tag, reader)
                if tag & sources:
                    self._need |= tag
                    exit.append(index)
        self.plan.exit = tuple(exit)
        self.plan.sent = tuple(TensorSpec.of(arguments[index]) for index in exit)
        return super()._leave(arguments)

    def _record(
        self, gate: Gate, call: Call, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        arguments, _ = flatten((args, kwargs))
        versions = [version(leaf) if isinstance(leaf, Tensor) else 0 for leaf in arguments]
        before = _random_state(self.cut.device)
        value = self.cut.keeper.draw(proceed, args, kwargs) if gate.random else proceed(*args, **kwargs)
        random = gate.random or not all(map(torch.equal, before, _random_state(self.cut.device)))
        gate.random = random
        written = tuple(
            index
            for index, (leaf, old) in enumerate(zip(arguments, versions, strict=True))
            if isinstance(leaf, Tensor) and version(leaf) != old
        )
        self.plan.outputs[call] = Output.of(gate.name, value, random=random, written=written)
        return value

    def _tag_parameters(self) -> None:
        for name, parameter in self.cut.parameters.items():
            if name in self.cut.outside:
                bit = self.provenance.sources.add(name)
                self._held[bit] = name
                self.provenance.set(parameter, bit)
        for name, buffer in self.cut.loose_buffers():
            bit = self.provenance.sources.add(name)
            self._buffers[bit] = name
            self.provenance.set(buffer, bit)
        for name, stand_in in self.cut.stand_ins.items():
            self.provenance.set(stand_in, self._absent_bit(name))
        for name, stage in self.cut.written_buffers.items():
            if stage != self.stage:
                self.provenance.set(self.cut.root.get_buffer(name), self._absent_bit(name))

    def _absent_bit(self, name: str) -> int:
        if name not in self._absent:
            self._absent[name] = self.provenance.sources.add(name, absent=True)
        return self._absent[name]

    def _refuse_wide_checkpoint(self, block: str, stage: int) -> None:
        for frame in _checkpoints():
            first, first_stage = self._checkpoints.setdefault(frame, (block, stage))
            if first_stage != stage:
                raise RuntimeError(
                    f"An activation checkpoint holds {first} and {block}, which are on two pipeline stages. Checkpoint "
                    "each block on its own, or choose a partition that keeps the two together."
                )

    def _refuse_reentrant(self, gate: Gate) -> None:
        codes = [frame.f_code for frame in _checkpoints()] if self.training else []
        if CheckpointFunction.forward.__code__ in codes:
            raise RuntimeError(
                f"{gate.name} runs under reentrant activation checkpointing, which hides its inputs from the pipeline. "
                "Pass use_reentrant=False to torch.utils.checkpoint.checkpoint (transformers: "
                'gradient_checkpointing_kwargs={"use_reentrant": False}).'
            )

    def _watch_recording_flags(self) -> list[Any]:
        hooks = []
        for name in self.cut.ancestors:
            module = self.cut.root.get_submodule(name)
            config = getattr(module, "config", None)
            self._refuse_flags(name, {flag: getattr(config, flag, False) for flag in RECORDING_FLAGS})
            hook = partial(self._refuse_flags_in_call, name)
            hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        return hooks

    def _refuse_flags_in_call(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._refuse_flags(name, kwargs)

    def _refuse_flags(self, name: str, options: dict[str, Any]) -> None:
        for flag in RECORDING_FLAGS:
            if options.get(flag):
                raise RuntimeError(
                    f"{name or 'The module'} is asked for {flag}, and what {self.cut.blocks[0]} records does not reach "
                    f"the stage of {self.cut.blocks[-1]}. Set {flag}=False; a loss made inside a block is added with "
                    "lightning_hybrid.add_auxiliary_loss(x, loss)."
                )


def uncompiled() -> AbstractContextManager[None]:
    """Compiled modules run as they are written: provenance must see each operation.

    Dynamo also gives up for good on code that it first meets under a dispatch mode.
    """
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def _random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def _checkpoints() -> list[FrameType]:
    """The calls under way that are torch's activation checkpointing."""
    frame, frames = inspect.currentframe(), []
    while frame is not None:
        if frame.f_code in CHECKPOINTS:
            frames.append(frame)
        frame = frame.f_back
    return frames
