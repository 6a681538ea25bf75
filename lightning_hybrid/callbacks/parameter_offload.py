"""Parameters in host memory, which stream through a few buffers on the device while blocks run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hybrid.callbacks.arguments import check_whole
from lightning_hybrid.callbacks.blocks import choose_blocks
from lightning_hybrid.parallel.memory.parameters import ParameterStreaming
from lightning_hybrid.parallel.memory.parameters_buffers import StreamCounts
from lightning_hybrid.parallel.memory.parameters_host import HostParameters, move_states

INSTEAD = {
    FSDPStrategy: "FSDPStrategy(cpu_offload=True)",
    ModelParallelStrategy: "CPUOffloadPolicy for fully_shard in configure_model",
    DeepSpeedStrategy: "DeepSpeedStrategy(stage=3, offload_parameters=True)",
}


class ParameterOffload(Callback):
    """Keep parameters in host memory, and copy those of a block to the device while it runs.

    A model trains whose parameters and optimizer states do not fit on the device: it has `num_buffers` buffers of the
    size of the largest unit, a unit being a block or a module beside the blocks. The first batch shows in which order
    units are read; later ones fetch the next ones ahead, on a stream of their own. The optimizer works on the host.
    The numbers are those of training without it.

    With `zero_stage=3` of this package's strategies it means `cpu_offload=True` of the strategy.

    Args:
        num_buffers: Buffers on the device, at least 2: one that is read, and those that the next units are copied to.
        blocks: Dotted names of the lists whose elements are the blocks; None finds them as a pipeline does.

    Attributes:
        streaming: What runs it, between set-up and the end; it has `device_bytes`, `units` and `resident` parameters.
        counts: Accesses of units, hits, accesses that were prefetched, copies, and how often computation had to wait.

    Raises:
        ValueError: If a keyword is out of range or, before training, if the strategy cannot work with it.

    Source: Cui et al. 2016, GeePS (EuroSys).
    """

    def __init__(self, num_buffers: int = 2, blocks: str | Sequence[str] | None = None) -> None:
        check_whole("num_buffers", num_buffers, 2)
        self.num_buffers, self.blocks = num_buffers, blocks
        self.streaming: ParameterStreaming | None = None
        self.counts = StreamCounts()
        self._host: HostParameters | None = None
        self._strategy: Strategy | None = None
        self._hooks: list[Any] = []

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._remove()
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        number = sum(isinstance(callback, ParameterOffload) for callback in callbacks)
        if number > 1:
            raise ValueError(f"The Trainer has {number} ParameterOffloads, and one streams all blocks. Keep one.")
        options = getattr(trainer.strategy, "options", {})
        check_strategy(trainer.strategy, options)
        if options.get("zero_stage") == 3:
            if not options["cpu_offload"]:
                rank_zero_info("ParameterOffload with zero_stage=3: the strategy's cpu_offload=True does it.")
                options["cpu_offload"] = True
            return
        self._host = HostParameters(pl_module)
        if isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
            self._strategy = trainer.strategy
            vars(self._strategy)["load_optimizer_state_dict"] = partial(_load_states, self._strategy)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._install(trainer, pl_module)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._install(trainer, pl_module)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._install(trainer, pl_module)

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._install(trainer, pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.streaming is not None:
            move_states(trainer.optimizers)  # Lightning has moved what was there before
            invalidate = self.streaming.buffers.invalidate
            self._hooks = [
                o.register_step_post_hook(lambda *_: invalidate())
                for o in trainer.optimizers
                if isinstance(o, Optimizer)
            ]

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._begin("train")

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._begin(f"validate {dataloader_idx}")

    @override
    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._begin(f"test {dataloader_idx}")

    @override
    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._begin(f"predict {dataloader_idx}")

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self.streaming is not None:
            self.streaming.transfers.synchronize()

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._end(trainer)

    def leave_batch(self, trainer: Trainer) -> None:
        """See `callback_states.leave_batch`."""
        self._end(trainer)

    @override
    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._end(trainer)

    @override
    def on_test_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._end(trainer)

    @override
    def on_predict_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._end(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._remove()

    def _install(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.streaming is not None or self._host is None:
            return
        _check_replicas(trainer.strategy)
        blocks = choose_blocks(trainer, pl_module, self.blocks)
        device = trainer.strategy.root_device
        self.streaming = ParameterStreaming(pl_module, list(blocks), device, self.num_buffers)
        self.counts = self.streaming.counts
        self._host.resident.update(self.streaming.resident)

    def _begin(self, kind: str) -> None:
        if self.streaming is not None:
            self.streaming.begin(kind)

    def _end(self, trainer: Trainer) -> None:
        if self.streaming is not None and self._host is not None:
            stray = self.streaming.end()
            if stray:
                self._host.resident.update(stray)
                move_states(trainer.optimizers)

    def _remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self.streaming is not None:
            self.streaming.remove()
        if self._host is not None:
            self._host.release()
        if self._strategy is not None:
            vars(self._strategy).pop("load_optimizer_state_dict", None)
        self.streaming, self._host, self._strategy, self._hooks = None, None, None, []


def check_strategy(strategy: Strategy, options: Mapping[str, Any]) -> None:
    """Refuse what can be seen before the model is set up.

    Raises:
        ValueError: Naming the strategy or its keyword, and the way out.
    """
    instead = next((way for kind, way in INSTEAD.items() if isinstance(strategy, kind)), None)
    if instead is not None:
        raise ValueError(
            f"ParameterOffload cannot work with {type(strategy).__name__}, which has parameters in a form of its own. "
            f"Leave it out, and use {instead}."
        )
    if "zero_stage" not in options and not isinstance(strategy, SingleDeviceStrategy | DDPStrategy):
        raise ValueError(
            f"ParameterOffload does not know {type(strategy).__name__}. Use one device, strategy='ddp' or "
            "'hybrid_ptdp', or leave it out."
        )
    if isinstance(strategy, DDPStrategy) and strategy.world_size > 1 and strategy.root_device.type != "cpu":
        raise ValueError(
            f"ParameterOffload over {strategy.world_size} replicas on {strategy.root_device.type}: "
            f"{type(strategy).__name__} cannot sum gradients that are in host memory. Use strategy='hybrid_zero3', "
            "where ParameterOffload means cpu_offload=True."
        )
    if options.get("zero_stage") == 3:
        return
    for axis in ("tensor_parallel_size", "expert_parallel_size"):
        if options.get(axis, 1) > 1:
            raise ValueError(
                f"ParameterOffload streams whole parameters, and {axis}={options[axis]} splits them. Set zero_stage=3, "
                f"where it means cpu_offload=True, or {axis}=1."
            )
    if getattr(strategy, "compute_dtype", None) is not None:
        raise ValueError(
            "ParameterOffload streams parameters as they are, and 16-bit copies of float32 masters are made of all of "
            "them at once. Set zero_stage=3, where it means cpu_offload=True, or choose precision='bf16-mixed'."
        )


def _check_replicas(strategy: Strategy) -> None:
    """Refuse what is known when the axes are.

    Raises:
        ValueError: Naming the stage, and the way out.
    """
    ground = getattr(strategy, "ground", None)
    replicas, stage = (1, 0) if ground is None else (ground.mesh.layout.data, strategy.options["zero_stage"])  # type: ignore[attr-defined]
    if replicas > 1 and (stage in (1, 2) or strategy.root_device.type != "cpu"):
        raise ValueError(
            f"ParameterOffload with zero_stage={stage} and {replicas} replicas: shards and sums of gradients are on "
            "the device. Set zero_stage=3, where it means cpu_offload=True, or leave ParameterOffload out and set "
            "cpu_offload=True, which keeps shards and optimizer states in host memory."
        )


def _load_states(strategy: Strategy, checkpoint: Mapping[str, Any]) -> None:
    """As Lightning does, without a way over the device: states go to where parameters are."""
    for optimizer, state in zip(strategy.optimizers, checkpoint["optimizer_states"], strict=False):
        optimizer.load_state_dict(state)
