"""What is refused before training starts, each with the values, the rule and the way out."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from math import isfinite
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_hybrid.compat import sync_batchnorm
from lightning_hybrid.parallel.mesh import Layout
from lightning_hybrid.parallel.pipeline.blocks import block_names, find_block_lists
from lightning_hybrid.parallel.tensor.install import SHOWN
from lightning_hybrid.parallel.tensor.plan import make_plan
from lightning_hybrid.parallel.tensor.planning.patterns import check_style
from lightning_hybrid.strategies.precisions import check_precision

AXES = ("pipeline_parallel_size", "tensor_parallel_size", "expert_parallel_size", "replicate_size")
NUMBERS = (*AXES, "num_chunks", "num_microbatches")
REDUCE_DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")
SCHEDULES = ("auto", "gpipe", "1f1b", "interleaved_1f1b")

REFUSED_CALLBACKS = {  # what each does to the whole model
    StochasticWeightAveraging: "averages all parameters in each process",
    WeightAveraging: "averages all parameters in each process",
    BaseFinetuning: "adds parameters to the optimizer in each process",
    LearningRateFinder: "trains all parameters and puts them back in each process",
    BatchSizeFinder: "trains all parameters and puts them back in each process",
    ModelPruning: "replaces parameters in each process",
}


def check_keywords(options: dict[str, Any]) -> None:
    """Check the constructor's keywords, before any process or group exists.

    Raises:
        ValueError: If a value is out of range, or names something that this version does not have yet.
    """
    _check_numbers(options)
    if options["schedule"] not in SCHEDULES:
        raise ValueError(f"schedule={options['schedule']!r} is not one of {', '.join(map(repr, SCHEDULES))}.")
    if options["num_chunks"] > 1 and options["schedule"] == "1f1b":
        raise ValueError(
            f"schedule='1f1b' runs one chunk a rank and num_chunks={options['num_chunks']}. Choose 'interleaved_1f1b' "
            "or 'gpipe'."
        )
    if options["num_chunks"] > 1 and options["pipeline_parallel_size"] == 1:
        raise ValueError(f"num_chunks={options['num_chunks']} needs pipeline_parallel_size of at least 2, got 1.")
    _check_lists(options["partition"], options["pipeline_layers"])
    _check_costs(options.get("block_costs"), options.get("max_stage_memory"), options["partition"])
    _check_tensor(options)
    _check_zero(options)
    if options.get("state_dict_type", "full") not in ("full", "sharded"):
        raise ValueError(f"state_dict_type={options['state_dict_type']!r} is not 'full' or 'sharded'.")


def _check_numbers(options: dict[str, Any]) -> None:
    for name in NUMBERS:
        value, automatic = options[name], name in ("pipeline_parallel_size", "num_microbatches")
        if value == "auto" and automatic:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"{name}={value!r} must be a whole number of at least 1" + (", or 'auto'." if automatic else ".")
            )


def _check_zero(options: Mapping[str, Any]) -> None:
    stage, replicate, dtype = options["zero_stage"], options["replicate_size"], options["reduce_dtype"]
    if isinstance(stage, bool) or not isinstance(stage, int) or stage not in range(4):
        raise ValueError(f"zero_stage={stage!r} is not 0, 1, 2 or 3.")
    if dtype not in REDUCE_DTYPES:
        raise ValueError(f"reduce_dtype={dtype!r} is not one of {', '.join(map(repr, REDUCE_DTYPES))}.")
    if replicate > 1 and stage == 0:
        raise ValueError(
            f"replicate_size={replicate} makes copies of shards, and zero_stage=0 shards nothing. Set zero_stage to 1, "
            "2 or 3, or leave replicate_size 1."
        )
    for name in ("cpu_offload", "accumulate_on_cpu"):
        if not isinstance(options[name], bool):
            raise ValueError(f"{name}={options[name]!r} is not True or False.")
    if options["cpu_offload"] and stage == 0:
        raise ValueError(
            "cpu_offload=True keeps shards in host memory, and zero_stage=0 makes none. Set zero_stage to 1, 2 or 3."
        )


def _check_tensor(options: Mapping[str, Any]) -> None:
    plan, sequence = options["tensor_parallel_plan"], options["sequence_parallel"]
    if plan != "auto" and not (
        isinstance(plan, Mapping) and all(isinstance(text, str) for entry in plan.items() for text in entry)
    ):
        raise ValueError(f"tensor_parallel_plan={plan!r} is not 'auto' or a dictionary of name patterns and styles.")
    for pattern, style in plan.items() if plan != "auto" else ():
        check_style(pattern, style)
    if not isinstance(sequence, bool) and sequence != "regather":
        raise ValueError(f"sequence_parallel={sequence!r} is not True, False or 'regather'.")
    if sequence and options["tensor_parallel_size"] == 1:
        raise ValueError(
            f"sequence_parallel={sequence!r} needs tensor_parallel_size of at least 2, got 1: it shares out what is "
            "between the split matrices. Set a size, or leave it False."
        )


def _check_lists(partition: Any, layers: Any) -> None:
    counts = partition if isinstance(partition, list | tuple) else []
    if partition not in ("balanced", "uniform") and not (counts and all(type(n) is int and n > 0 for n in counts)):
        raise ValueError(f"partition={partition!r} is not 'balanced', 'uniform' or a list of block counts.")
    names = [layers] if isinstance(layers, str) else layers
    if layers is not None and not (names and isinstance(names, list | tuple) and all(type(n) is str for n in names)):
        raise ValueError(f"pipeline_layers={layers!r} is not the dotted name of a list of blocks, or a list of names.")


def _check_costs(costs: Any, memory: Any, partition: Any) -> None:
    if costs is not None and not isinstance(costs, list | tuple):
        raise ValueError(f"block_costs={costs!r} is not a list with the cost of each block.")
    for index, cost in enumerate(costs or ()):
        if isinstance(cost, bool) or not isinstance(cost, int | float) or not (isfinite(cost) and cost >= 0):
            raise ValueError(
                f"block_costs[{index}]={cost!r} must be a finite number, not negative, in the same unit as the others. "
                "lightning_hybrid.measure_costs(module, batch) makes the list."
            )
    if memory is not None and (type(memory) is not int or memory < 1):
        raise ValueError(f"max_stage_memory={memory!r} must be a whole number of bytes, at least 1.")
    if memory is not None and partition != "balanced":
        raise ValueError(
            f"max_stage_memory={memory} is kept by partition='balanced' only, got partition={partition!r}. Leave one "
            "of the two out."
        )


def check_module(module: LightningModule, layout: Layout, options: Mapping[str, Any]) -> None:
    """Refuse what cannot run as several micro-batches, replicas or stages.

    Args:
        module: The user's module.
        layout: Sizes of the axes.
        options: The strategy's keywords.

    Raises:
        ValueError: Naming the feature and the way out.
    """
    microbatches = options["num_microbatches"]
    if not module.automatic_optimization and (layout.pipeline > 1 or microbatches not in ("auto", 1)):
        raise ValueError(
            "automatic_optimization=False: the backward passes belong to the pipeline's schedule, with "
            f"pipeline_parallel_size={layout.pipeline} and num_microbatches={microbatches}. Let Lightning "
            "optimize, or set both to 1, where manual optimization and several optimizers work."
        )
    if not module.automatic_optimization and layout.expert > 1:
        raise ValueError(
            f"automatic_optimization=False with expert_parallel_size={layout.expert}: replicas send each other tokens, "
            "and must run the same forward and backward passes. Let Lightning optimize, or set expert_parallel_size=1."
        )
    if not module.automatic_optimization and options["accumulate_on_cpu"]:
        raise ValueError(
            "accumulate_on_cpu=True with automatic_optimization=False: a manual step decides itself what accumulates. "
            "Leave accumulate_on_cpu False, or let Lightning optimize."
        )
    if not module.automatic_optimization and layout.data > 1 and options["zero_stage"] > 0:
        rank_zero_warn(
            f"zero_stage={options['zero_stage']} does not apply to manual optimization: optimizer states are "
            "replicated, as with zero_stage=0."
        )
    if type(module).backward is not LightningModule.backward:
        raise ValueError(
            f"{type(module).__name__}.backward is overridden, and the pipeline's schedule runs the backward passes "
            "itself. Move what it does to on_before_backward or on_after_backward."
        )


def check_sparse(module: LightningModule, layout: Layout, options: Mapping[str, Any], *, masters: bool) -> None:
    """Refuse embeddings with sparse gradients where gradients are summed over replicas, sharded or unscaled.

    Raises:
        ValueError: Naming the module.
    """
    kinds = (nn.Embedding, nn.EmbeddingBag)
    found = [name for name, child in module.named_modules() if isinstance(child, kinds) and child.sparse]
    if found and (layout.data > 1 or options["cpu_offload"] or masters):
        raise ValueError(
            f"{found[0]} has sparse=True, and replicas, shards and master weights need dense gradients. Set "
            "sparse=False, or train in one replica with precision='32-true'."
        )


def check_before_launch(trainer: Trainer, options: Mapping[str, Any]) -> None:
    """Refuse what can be seen before any process is started: one error instead of one from each.

    Raises:
        ValueError: Naming the feature and the way out.
    """
    check_precision(trainer.precision_plugin)
    check_steps(trainer.lightning_module)
    if trainer.state.fn == TrainerFn.FITTING:
        check_trainer(trainer)
    if options.get("tensor_parallel_size", 1) > 1:
        _check_plan(trainer.lightning_module, options)


def _check_plan(module: LightningModule, options: Mapping[str, Any]) -> None:
    """Refuse a plan that cannot be; that of a model which is yet to be made, or is split, is not known here."""
    made_later = type(module).configure_model is not LightningModule.configure_model
    if made_later or any(SHOWN in vars(child) for child in module.modules()):
        return
    blocks = block_names(module, find_block_lists(module, options["pipeline_layers"]))
    size, plan = options["tensor_parallel_size"], options["tensor_parallel_plan"]
    make_plan(module, blocks, size, plan, sequence_parallel=bool(options["sequence_parallel"]))


def check_steps(module: LightningModule) -> None:
    """Refuse steps that fetch their own batches.

    Raises:
        ValueError: Naming the step.
    """
    for step in ("training_step", "validation_step", "test_step", "predict_step"):
        if "dataloader_iter" in signature(getattr(module, step)).parameters:
            raise ValueError(f"{step}(self, dataloader_iter) is not supported: the strategy cuts each batch itself.")


def may_accumulate(trainer: Trainer) -> bool:
    """Whether a step has several batches, or a callback may let it have them while training goes on."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return trainer.accumulate_grad_batches > 1 or any(
        isinstance(callback, GradientAccumulationScheduler) or getattr(callback, "grows_accumulation", False)
        for callback in callbacks
    )


def check_trainer(trainer: Trainer) -> None:
    """Refuse what works on all parameters in each process.

    Raises:
        ValueError: Naming the feature and the way out.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        reason = next((what for kind, what in REFUSED_CALLBACKS.items() if isinstance(callback, kind)), None)
        if reason is not None:
            raise ValueError(
                f"{type(callback).__name__} {reason}, and a stage or a shard holds only some of them. Leave it out, or "
                "use strategy='ddp'."
            )
    if sync_batchnorm(trainer.strategy):
        raise ValueError(
            "sync_batchnorm=True is not supported yet: statistics are those of a micro-batch. Leave it out, or use "
            "strategy='ddp'."
        )
