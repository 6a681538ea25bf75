"""`Trainer(strategy="hybrid_ptdp")`: pipeline and data parallelism for a LightningModule that nobody rewrote."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from datetime import timedelta
from inspect import signature
from typing import Any, Literal

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hybrid.compat import is_accumulating
from lightning_hybrid.parallel.executor import Event
from lightning_hybrid.parallel.gradients import install_gradients, take_gradients
from lightning_hybrid.strategies import checks
from lightning_hybrid.strategies.assembly import Assembly, Ground, assemble, survey
from lightning_hybrid.strategies.clipping import Clipping
from lightning_hybrid.strategies.evaluation import DataLoaders
from lightning_hybrid.strategies.metric_objects import compute_metrics_together
from lightning_hybrid.strategies.optimizers import ParameterGroups
from lightning_hybrid.strategies.processes import DEFAULT_TIMEOUT, ProcessStrategy
from lightning_hybrid.strategies.summary import SummaryBeforeCut


class HybridPTDPStrategy(ProcessStrategy):
    """Pipeline x data parallel training of an unmodified LightningModule, with the numbers of one process.

    Args:
        pipeline_parallel_size: Ranks that one copy of the model is spread over; "auto" is the smallest divisor of at
            least 2 of the number of processes that is not above the number of blocks, else 1.
        tensor_parallel_size: 1; larger sizes are refused in this version.
        expert_parallel_size: 1; larger sizes are refused in this version.
        replicate_size: 1; larger sizes are refused in this version.
        num_chunks: Stages that one rank holds, at least 1; more than 1 interleaves (arXiv:2104.04473, section 2.2.2).
        num_microbatches: Parts that each rank's batch is cut into; "auto" is 4 a pipeline rank, 1 without a pipeline.
            A smaller batch makes fewer.
        schedule: "gpipe", "1f1b", "interleaved_1f1b"; "auto" is 1F1B, interleaved if there are chunks.
        pipeline_layers: Dotted names of the lists of blocks to cut between; None finds them.
        partition: Blocks of each stage: by cost, so that the slowest stage is as fast as can be, by count, or given.
        block_costs: Cost of each block with what stands beside it, as `measure_costs` gives it; None counts parameters.
        max_stage_memory: Most bytes of parameters that "balanced" gives a stage; None sets no limit.
        zero_stage: 0 replicates everything over the data axis, 1 shards optimizer states (arXiv:1910.02054, section
            5.1).
        process_group_backend: Backend of the default process group; None chooses by device.
        timeout: Longest wait of a collective.

    Raises:
        ValueError: If a keyword is out of range or not supported yet.
    """

    strategy_name = "hybrid_ptdp"

    def __init__(
        self,
        pipeline_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        replicate_size: int = 1,
        num_chunks: int = 1,
        num_microbatches: int | Literal["auto"] = "auto",
        schedule: Literal["auto", "gpipe", "1f1b", "interleaved_1f1b"] = "auto",
        pipeline_layers: str | list[str] | None = None,
        partition: Literal["balanced", "uniform"] | list[int] = "balanced",
        block_costs: list[float] | None = None,
        max_stage_memory: int | None = None,
        zero_stage: Literal[0, 1, 2, 3] = 1,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__(process_group_backend, timeout)
        keywords = set(signature(HybridPTDPStrategy).parameters) - {"process_group_backend", "timeout"}
        self.options: dict[str, Any] = {name: value for name, value in locals().items() if name in keywords}
        checks.check_keywords(self.options)
        self.record_timeline = False
        self._ground: Ground | None = None
        self._assembly: Assembly | None = None
        self._loaders = DataLoaders()
        self._summary = SummaryBeforeCut()
        self._clipping: Clipping | None = None
        self._taken, self._has_run = list[Any](), False

    @property
    def is_distributed(self) -> bool:
        """Whether replicas see different data: Lightning then gives each its share, and else leaves samplers alone."""
        return self.world_size > 1 if self._ground is None else self._ground.mesh.layout.data > 1

    @property
    def ground(self) -> Ground:
        """Layout and groups; they exist once Lightning sets the strategy up, before the optimizers are made."""
        if self._ground is None:
            raise RuntimeError("Trainer.fit, validate, test or predict sets the strategy up; it has no layout before.")
        return self._ground

    @property
    def assembly(self) -> Assembly:
        """The engine and what belongs to it; it exists after the optimizers."""
        if self._assembly is None:
            raise RuntimeError("Trainer.fit, validate, test or predict sets the strategy up; it has no engine before.")
        return self._assembly

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        module = self.lightning_module
        assert module is not None
        self.accelerator.setup(trainer)
        checks.check_precision(self.precision_plugin)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self._summary.show(trainer, module)
        self.model = self.precision_plugin.convert_module(module)
        if self._assembly is None or self._assembly.module is not module:
            self._ground = survey(module, self.options, device=self.root_device, timeout=self.timeout)
            self._assembly = self._assemble(trainer, module, self._ground, fitting)
        elif fitting:
            self._assembly.check_whole()
            self.setup_optimizers(trainer)
            self._assembly.groups = ParameterGroups(self.optimizers, module)
        self.setup_precision_plugin()
        # every logged value is combined over all ranks before Lightning sees it, and no sample is seen twice
        warnings.filterwarnings("ignore", message="It is recommended to use `self.log\\(.*sync_dist=True")
        warnings.filterwarnings("ignore", message="Using `DistributedSampler` with the dataloaders")
        if self.world_size > 1:
            self._assembly.hooks.install()
            compute_metrics_together(trainer)
        if not self._assembly.is_plain:
            self._clipping = Clipping(
                self._assembly.engine, self.precision_plugin, self._assembly.hooks.norm_watch
            )

    def _assemble(self, trainer: Trainer, module: LightningModule, ground: Ground, fitting: bool) -> Assembly:
        groups = None
        is_plain = self.world_size == 1 and self.options["num_microbatches"] in ("auto", 1)
        if fitting:
            self.setup_optimizers(trainer)
            if not is_plain or trainer.accumulate_grad_batches > 1:
                checks.check_module(module)
                checks.check_trainer(trainer)
                checks.check_optimizers(self.optimizers)
            groups = ParameterGroups(self.optimizers, module)
        assembly = assemble(module, self.options, ground, groups)
        assembly.is_plain = is_plain
        return assembly

    @override
    def model_to_device(self) -> None:
        """`assemble` moves the part of the model that stays."""

    @override
    def teardown(self) -> None:
        self._summary.restore()
        if self._assembly is not None:
            self._assembly.hooks.remove()
        if self._clipping is not None:
            self._clipping.remove()
        assert self.cluster_environment is not None
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self.cluster_environment.teardown()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assembly = self.assembly
        trainer = assembly.module.trainer
        accumulate = trainer.accumulate_grad_batches
        if assembly.is_plain and accumulate == 1:
            return super().training_step(*args, **kwargs)
        first = trainer.fit_loop.batch_idx % accumulate == 0  # when Lightning zeroes gradients too
        if first:
            take_gradients(assembly.engine.local_parameters())  # left over from a window that was never applied
        self._has_run = True
        assembly.engine.executor.record = self.record_timeline
        output = assembly.runner.train(
            [*args, *kwargs.values()],
            self.precision_plugin.train_step_context,
            name=(trainer.current_epoch, trainer.fit_loop.batch_idx),
            accumulate=accumulate,
            first=first,
            last=not is_accumulating(trainer),
            on_planned=assembly.settle,
        )
        self._taken = take_gradients(assembly.engine.local_parameters())
        return output

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """The schedule has run autograd; give the optimizer what `training_step` took away from `zero_grad`."""
        if not self._has_run:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        module = self.assembly.module
        self.pre_backward(closure_loss)
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        install_gradients(self._taken)
        self._taken, self._has_run = [], False
        loss = self.precision_plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.assembly.is_plain:
            return super().validation_step(*args, **kwargs)
        return self._evaluate(
            "validation_step", "val", self.precision_plugin.val_step_context, [*args, *kwargs.values()]
        )

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.assembly.is_plain:
            return super().test_step(*args, **kwargs)
        return self._evaluate("test_step", "test", self.precision_plugin.test_step_context, [*args, *kwargs.values()])

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.assembly.engine.cut is not None:
            checks.refuse_predict()
        return super().predict_step(*args, **kwargs)

    def _evaluate(self, hook: str, kind: str, context: Any, args: list[Any]) -> Any:
        loader = args[2] if len(args) > 2 and isinstance(args[2], int) else 0
        counts = self._loaders.next_counts(kind, loader)
        return self.assembly.runner.evaluate(hook, args, context, name=tuple(args[1:]), counts=counts)

    @override
    def on_validation_start(self) -> None:
        self._loaders.start("val")
        self.assembly.engine.prepare_evaluation()

    @override
    def on_test_start(self) -> None:
        self._loaders.start("test")
        self.assembly.engine.prepare_evaluation()

    @override
    def on_validation_end(self) -> None:
        self.assembly.engine.finish_evaluation()

    @override
    def on_test_end(self) -> None:
        self.assembly.engine.finish_evaluation()

    @property
    @override
    def data_group(self) -> dist.ProcessGroup | None:
        return self._ground.mesh.data_group if self._ground is not None else None

    @override
    def barrier(self, name: str | None = None) -> None:
        self._loaders.announce(name)
        super().barrier(name)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        mesh = self.ground.mesh
        return {"num_replicas": mesh.layout.data, "rank": mesh.data_rank}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return self._loaders.process(dataloader, self.ground.mesh, self.ground.seed)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self.assembly.model_state()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self.assembly.optimizer_state(self.optimizers, optimizer)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._assembly is not None:
            self._assembly.check_loadable()
        super().load_model_state_dict(checkpoint, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        checks.check_resumable(self.world_size)
        super().load_optimizer_state_dict(checkpoint)

    def timeline(self) -> list[Event]:
        """Measured times of the last step's actions on all ranks of this replica's pipeline; all ranks must call it.

        Set `record_timeline = True` before the step.
        """
        return self.assembly.engine.timeline()
