"""`Trainer(strategy="hybrid_ptdp")`: pipeline, tensor, data parallelism for a LightningModule that nobody rewrote."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from inspect import signature
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hybrid.compat import around_dump
from lightning_hybrid.strategies import checks
from lightning_hybrid.strategies.assembling import assemble
from lightning_hybrid.strategies.evaluation import next_epoch
from lightning_hybrid.strategies.measured import MeasuredStrategy
from lightning_hybrid.strategies.optimizer_checks import check_optimizers
from lightning_hybrid.strategies.optimizers import ParameterGroups
from lightning_hybrid.strategies.precisions import Masters, check_masters, check_precision
from lightning_hybrid.strategies.processes import DEFAULT_TIMEOUT
from lightning_hybrid.strategies.summary import SummaryBeforeCut
from lightning_hybrid.strategies.survey import survey
from lightning_hybrid.strategies.training import Training


class HybridPTDPStrategy(MeasuredStrategy):
    """Pipeline x tensor x data parallel training of an unmodified LightningModule, with the numbers of one process.

    Args:
        pipeline_parallel_size: Ranks that one copy of the model is spread over; "auto" is the smallest divisor of at
            least 2 of the number of processes that is not above the number of blocks, else 1.
        tensor_parallel_size: Ranks that share the matrices of each stage (arXiv:1909.08053, section 3).
        expert_parallel_size: Neighbouring replicas that share out each layer's experts, and send each other tokens.
        replicate_size: Groups of replicas that each hold all shards; parameters are gathered within a group only
            (arXiv:2304.11277, section 3.2.2).
        num_chunks: Stages that one rank holds, at least 1; more than 1 interleaves (arXiv:2104.04473, section 2.2.2).
        num_microbatches: Parts that each rank's batch is cut into; "auto" is 4 a pipeline rank, 1 without a pipeline.
            A smaller batch makes fewer.
        schedule: "gpipe", "1f1b", "interleaved_1f1b"; "auto" is 1F1B, interleaved if there are chunks.
        pipeline_layers: Dotted names of the lists of blocks to cut between; None finds them.
        partition: Blocks of each stage: by cost, so that the slowest stage is as fast as can be, by count, or given.
        block_costs: Cost of each block with what stands beside it, as `measure_costs` gives it; None counts parameters.
        max_stage_memory: Most bytes of parameters that "balanced" gives a stage; None sets no limit.
        zero_stage: 0 replicates everything over the data axis; 1 shards optimizer states, 2 gradients too, 3 parameters
            too (arXiv:1910.02054, section 5).
        cpu_offload: Shards, their gradients and optimizer states live in host memory.
        reduce_dtype: Type in which gradients are summed over the replicas; "auto" is float32 for 16-bit parameters, and
            else their own.
        accumulate_on_cpu: Gradients are in host memory between the batches of an accumulation window; they are summed
            over the replicas after each batch.
        tensor_parallel_plan: Styles of modules, by patterns of dotted names such as `"*.q_proj"`; "auto" takes the
            model's own plan, or recognises common blocks. Unused with a tensor_parallel_size of 1.
        sequence_parallel: What is between split matrices works on shards of the sequence (arXiv:2205.05198, section
            4.2); "regather" keeps only shards for backward, and gathers inputs once more.
        state_dict_type: "full" writes one file, as one process would; "sharded" a folder, to which every rank writes
            what it has. Either is loaded under any layout.
        async_save: Training goes on, after a copy to host memory, while a checkpoint is written.
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
        cpu_offload: bool = False,
        reduce_dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = "auto",
        accumulate_on_cpu: bool = False,
        tensor_parallel_plan: dict[str, str] | Literal["auto"] = "auto",
        sequence_parallel: bool | Literal["regather"] = False,
        state_dict_type: Literal["full", "sharded"] = "full",
        async_save: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__(process_group_backend, timeout, async_save=async_save)
        self._training, self._summary = Training(), SummaryBeforeCut()
        keywords = set(signature(HybridPTDPStrategy).parameters) - {"process_group_backend", "timeout"}
        self.options = {name: value for name, value in locals().items() if name in keywords}
        checks.check_keywords(self.options)
        self.record_timeline = False

    @property
    def is_distributed(self) -> bool:
        """Whether replicas see different data: Lightning then gives each its share, and else leaves samplers alone."""
        return self.world_size > 1 if self._ground is None else self._ground.mesh.layout.data > 1

    @override
    def setup(self, trainer: Trainer) -> None:
        module = trainer.lightning_module
        trainer.accelerator.setup(trainer)
        check_precision(self.precision_plugin)
        present = self._assembly if self._assembly is not None and self._assembly.module is module else None
        if present is None:
            seed, dtype = self.resuming.seed, self.compute_dtype
            self._ground = survey(module, self.options, self.root_device, self.timeout, seed=seed, param_dtype=dtype)
        else:
            present.restart(self.resuming.seed if self.is_fitting else None)
        self.model, groups = self.precision_plugin.convert_module(module), None
        if self.is_fitting:
            with present.whole_module() if present is not None else nullcontext():
                self._summary.show(trainer, module)
                groups = self._group_parameters(trainer, module)
        if present is None:
            self._assembly = assemble(module, self.options, self.ground, groups, is_plain=self._is_plain)
        elif groups is not None:
            present.use(groups)
        self.load_waiting_model()
        if self.is_fitting:
            self.evaluation.loaders.resume(self.resuming.prepare(self.ground.mesh))
        if isinstance(self.precision_plugin, Masters):
            self.precision_plugin.bind(self.assembly.engine)
        self.setup_precision_plugin()
        self.assembly.install(trainer, self.precision_plugin)
        around_dump(trainer, self.checkpoints.dumping)
        self.checkpoints.watch(trainer)

    @property
    def block_names(self) -> list[str]:
        """Dotted names of the blocks, of all stages in order; known once the model has been set up."""
        return self.ground.blocks

    @property
    def block_runs(self) -> list[list[str]]:
        """Dotted names of the blocks in runs: those of one list on one stage, which follow each other."""
        return self.ground.runs or [self.ground.blocks]

    @property
    def tensor_group(self) -> dist.ProcessGroup | None:
        """Ranks that share the matrices of a stage; None on a tensor axis of one rank."""
        return self.ground.mesh.tensor_group if self.ground.mesh.layout.tensor > 1 else None

    @property
    def _is_plain(self) -> bool:
        """One process and one micro-batch: Lightning's own path serves."""
        alone = self.world_size == 1 and self.options["num_microbatches"] in ("auto", 1)
        on_host = self.options["cpu_offload"] or self.options["accumulate_on_cpu"]
        return alone and not on_host and self.compute_dtype is None

    def _group_parameters(self, trainer: Trainer, module: LightningModule) -> ParameterGroups:
        """Make the optimizers over the whole module, and note which parameters they have."""
        self.setup_optimizers(trainer)
        self.check_callbacks(trainer)
        if not self._is_plain or checks.may_accumulate(trainer):
            checks.check_module(module, self.ground.mesh.layout, self.options)
            checks.check_steps(module)
            checks.check_trainer(trainer)
            check_optimizers(self.optimizers, module, self.ground.mesh.layout, self.options)
        check_masters(self.precision_plugin, module, self.optimizers)
        checks.check_sparse(module, self.ground.mesh.layout, self.options, masters=self.compute_dtype is not None)
        return ParameterGroups(self.optimizers, module)

    @override
    def model_to_device(self) -> None:
        """`assemble` moves the part of the model that stays."""

    @override
    def on_train_end(self) -> None:
        self.checkpoints.wait()

    @override
    def teardown(self) -> None:
        self.leave()
        self.checkpoints.end(sys.exc_info()[1])
        self._summary.restore()
        self.evaluation.restore()
        if self._assembly is not None:
            self._assembly.remove()
        assert self.cluster_environment is not None
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self.cluster_environment.teardown()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_plain and self.assembly.module.trainer.accumulate_grad_batches == 1:
            return super().training_step(*args, **kwargs)
        args = (*args, *kwargs.values())
        if not self.assembly.module.automatic_optimization:
            return self._training.step_by_hand(self.assembly, self.precision_plugin, args)
        return self._training.step(self.assembly, self.precision_plugin, args, record=self.record_timeline)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """The schedule has run autograd; only the hooks around it are left, and the gradients to be installed."""
        module = self.assembly.module
        if not module.automatic_optimization and self.world_size > 1:
            parent = super().backward
            return self._training.backward_by_hand(
                self.assembly.engine, closure_loss, lambda loss: parent(loss, optimizer, *args, **kwargs)
            )
        if not self._training.has_run:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        self.pre_backward(closure_loss)
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        self._training.install()
        loss = self.precision_plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    @override
    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        if not self.assembly.module.automatic_optimization:
            closure = self._training.checked(closure, self.assembly.engine)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_plain:
            return super().validation_step(*args, **kwargs)
        return self.evaluation.step("validation_step", self.assembly, self.precision_plugin, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_plain:
            return super().test_step(*args, **kwargs)
        return self.evaluation.step("test_step", self.assembly, self.precision_plugin, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_plain:
            return super().predict_step(*args, **kwargs)
        return self.evaluation.predict(self.assembly, self.precision_plugin, args, kwargs)

    @override
    def on_validation_start(self) -> None:
        self.evaluation.start("validation_step", self.assembly)

    @override
    def on_test_start(self) -> None:
        self.evaluation.start("test_step", self.assembly)

    @override
    def on_predict_start(self) -> None:
        self.evaluation.start("predict_step", self.assembly)

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Where `configure_model` makes tensors; `Trainer.init_module(empty_init=True)` means the meta device."""
        if not empty_init:
            with super().tensor_init_context():
                yield
            return
        with torch.device("meta"), self.precision_plugin.tensor_init_context():
            yield

    def _finish_evaluation(self) -> None:
        self.assembly.engine.finish_evaluation()

    on_validation_end = on_test_end = on_predict_end = _finish_evaluation

    @property
    @override
    def data_group(self) -> dist.ProcessGroup | None:
        return self._ground.mesh.data_group if self._ground is not None else None

    @override
    def barrier(self, name: str | None = None) -> None:
        self.evaluation.loaders.announce(name)
        if name == "train_dataloader()":
            self.resuming.restore_random(self.ground.mesh, in_epoch=False)
        super().barrier(name)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        mesh = self.ground.mesh
        return {"num_replicas": mesh.layout.data, "rank": mesh.data_rank}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        epoch = next_epoch(self.lightning_module.trainer)
        seed = self.ground.seed if self._assembly is None else self._assembly.engine.seed  # a resumed run's
        return self.evaluation.loaders.process(dataloader, self.ground.mesh, seed, epoch=epoch)
