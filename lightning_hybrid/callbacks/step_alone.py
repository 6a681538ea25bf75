"""`training_step` called beside training, which goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from lightning_hybrid.callbacks.global_batch import num_replicas
from lightning_hybrid.parallel.pipeline.snapshot import Snapshot

NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


def refuse_parts(trainer: Trainer, pl_module: LightningModule, name: str) -> None:
    """Refuse what cannot run a step by itself on each rank; call it from `on_fit_start` on.

    Args:
        trainer: Its strategy must leave the whole model on each rank, as it is, between steps.
        pl_module: The model.
        name: Of the callback, for the error.

    Raises:
        ValueError: With what stands in the way, and the way out.
    """
    kind, steps = type(pl_module).__name__, pl_module.training_step
    if not pl_module.automatic_optimization:
        raise ValueError(
            f"{name} runs training_step many times, and {kind} would step its optimizers in it. Remove it."
        )
    if is_param_in_hook_signature(steps, "dataloader_iter", explicit=True):
        raise ValueError(f"{name} needs a batch, and {kind}.training_step fetches its own. Remove {name}.")
    if hasattr(pl_module, "split_batch"):
        raise ValueError(f"{name} cuts batches by samples, and {kind} has split_batch for others. Remove {name}.")
    strategy: Any = trainer.strategy
    way_out = f'Use {name} with strategy "auto" or "ddp", on a model that fits, and take the result from there.'
    if hasattr(strategy, "record_timeline"):
        reason = _parts(trainer)
        if reason:
            raise ValueError(
                f"{name} cannot run a step by itself under {type(strategy).__name__} with {reason}. {way_out}"
            )
    elif isinstance(strategy, DeepSpeedStrategy) or not isinstance(strategy, SingleDeviceStrategy | DDPStrategy):
        raise ValueError(f"{name} cannot run a step by itself under {type(strategy).__name__}. {way_out}")


def _parts(trainer: Trainer) -> str:
    """Options with which a rank of `hybrid_ptdp` has no whole model, or has it in another form; "" if it has."""
    strategy: Any = trainer.strategy
    data, options = num_replicas(trainer), strategy.options
    if trainer.world_size != data:
        return f"{trainer.world_size // data} ranks that share the model (pipeline or tensor_parallel_size above 1)"
    dealt = {name: options[name] for name in ("zero_stage", "expert_parallel_size") if data > 1}
    dealt = {name: value for name, value in dealt.items() if value > (name == "expert_parallel_size")}
    if options["cpu_offload"]:
        dealt["cpu_offload"] = True
    if strategy.compute_dtype is not None:
        dealt["precision"] = trainer.precision
    return ", ".join(f"{name}={value!r}" for name, value in dealt.items())


class StepAlone:
    """Runs `training_step` and its backward pass for nobody.

    Parameters keep their gradients, and hooks that sum gradients do not run: gradients are asked for, not accumulated.
    Buffers, attributes, metrics and random streams are put back after each step; `self.log` and loggers take nothing.
    `kept` puts back parameters, as a step may move those of a teacher.

    Args:
        trainer: In `fit`, with a strategy that `refuse_parts` has let pass.
        pl_module: Its module.
    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trainer, self._module = trainer, pl_module
        self._device = trainer.strategy.root_device
        self._parameters = [parameter for parameter in pl_module.parameters() if parameter.requires_grad]
        self._counting: list[Any] = [m for m in pl_module.modules() if hasattr(type(m), "balance_group")]
        self._takes_index = is_param_in_hook_signature(pl_module.training_step, "batch_idx", min_args=2)

    @property
    def gradients(self) -> Tensor:
        """Zeros, as many bytes as all gradients have, of the type of the first."""
        num_bytes = sum(parameter.nbytes for parameter in self._parameters)
        dtype = self._parameters[0].dtype
        return torch.zeros(-(-num_bytes // dtype.itemsize), dtype=dtype, device=self._device)

    @property
    def least(self) -> int:
        """Fewest samples that a step is sure to train on: one has no statistics in batch normalisation of vectors."""
        return 1 + any(isinstance(module, NORMS) for module in self._module.modules())

    def wait(self) -> None:
        """Wait for the device."""
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Context of all steps: parameters are as before afterwards. Their copies are in the host's memory."""
        copies = [(parameter, parameter.detach().to("cpu", copy=True)) for parameter in self._module.parameters()]
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, copy in copies:
                    parameter.copy_(copy)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Context of a step: the module is as before afterwards."""
        attributes, loggers = vars(self._module), list(self._trainer.loggers)
        before = attributes.get("log")
        attributes["log"] = _say_nothing
        self._trainer.loggers = [DummyLogger() for _ in loggers]
        try:
            with Snapshot(self._module, self._device):
                for module in self._counting:  # layers of experts, whose statistics are another object's
                    module.reduces = False
                yield
        finally:
            self._trainer.loggers = loggers
            del attributes["log"]
            if before is not None:
                attributes["log"] = before

    def run(self, batch: Any, batch_idx: int, before_backward: Callable[[], object] = lambda: None) -> None:
        """Forward and backward of a batch, within `unseen`.

        Args:
            batch: The batch.
            batch_idx: Its number.
            before_backward: Called between the two.

        Raises:
            TypeError: If the step returns no loss.
        """
        with self._trainer.strategy.precision_plugin.train_step_context():
            output = self._module.training_step(batch, *([batch_idx] if self._takes_index else []))
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"{type(self._module).__name__}.training_step returned {type(output).__name__} without a loss for "
                "the first batch, which a profile needs. Return the loss, or remove the callback."
            )
        before_backward()
        torch.autograd.grad(loss, self._parameters, allow_unused=True)


def _say_nothing(*args: object, **kwargs: object) -> None:
    """Stand for `LightningModule.log`."""
