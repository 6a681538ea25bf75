"""What is refused for its configuration: keywords at construction, and before training what does not fit the model."""

import re
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_hybrid import HybridPTDPStrategy
from lightning_hybrid.strategies.layouts import choose_layout
from tests.launch import run_trainers
from tests.small import Small, fit, hybrid, loader, refusal

AT_LEAST_1 = "must be a whole number of at least 1"
KEYWORDS = [
    ({"pipeline_parallel_size": 0}, f"pipeline_parallel_size=0 {AT_LEAST_1}, or 'auto'."),
    ({"pipeline_parallel_size": -2}, f"pipeline_parallel_size=-2 {AT_LEAST_1}, or 'auto'."),
    ({"pipeline_parallel_size": 2.0}, f"pipeline_parallel_size=2.0 {AT_LEAST_1}, or 'auto'."),
    ({"pipeline_parallel_size": True}, f"pipeline_parallel_size=True {AT_LEAST_1}, or 'auto'."),
    ({"pipeline_parallel_size": "2"}, f"pipeline_parallel_size='2' {AT_LEAST_1}, or 'auto'."),
    ({"pipeline_parallel_size": None}, f"pipeline_parallel_size=None {AT_LEAST_1}, or 'auto'."),
    ({"num_chunks": 0}, f"num_chunks=0 {AT_LEAST_1}."),
    ({"num_chunks": "auto"}, f"num_chunks='auto' {AT_LEAST_1}."),
    ({"num_microbatches": 0}, f"num_microbatches=0 {AT_LEAST_1}, or 'auto'."),
    ({"num_microbatches": 2.5}, f"num_microbatches=2.5 {AT_LEAST_1}, or 'auto'."),
    ({"schedule": "dualpipe"}, "schedule='dualpipe' is not one of 'auto', 'gpipe', '1f1b', 'interleaved_1f1b'."),
    ({"num_chunks": 2, "schedule": "1f1b"}, "schedule='1f1b' runs one chunk a rank and num_chunks=2. Choose"),
    ({"num_chunks": 2, "pipeline_parallel_size": 1}, "num_chunks=2 needs pipeline_parallel_size of at least 2, got 1."),
    ({"partition": "even"}, "partition='even' is not 'balanced', 'uniform' or a list of block counts."),
    ({"partition": 3}, "partition=3 is not 'balanced', 'uniform' or a list of block counts."),
    ({"partition": [2.5, 3.5]}, r"partition=[2.5, 3.5] is not 'balanced', 'uniform' or a list of block counts."),
    ({"partition": [3, 0]}, "partition=[3, 0] is not 'balanced', 'uniform' or a list of block counts."),
    ({"partition": []}, "partition=[] is not 'balanced', 'uniform' or a list of block counts."),
    ({"block_costs": "1 2"}, "block_costs='1 2' is not a list with the cost of each block."),
    ({"block_costs": [1.0, -2.5]}, "block_costs[1]=-2.5 must be a finite number, not negative, in the same unit"),
    ({"block_costs": [float("nan")]}, "block_costs[0]=nan must be a finite number, not negative"),
    ({"block_costs": [1, float("inf")]}, "block_costs[1]=inf must be a finite number, not negative"),
    ({"block_costs": [True]}, "block_costs[0]=True must be a finite number, not negative"),
    ({"max_stage_memory": 0}, "max_stage_memory=0 must be a whole number of bytes, at least 1."),
    ({"max_stage_memory": 2.5e9}, "max_stage_memory=2500000000.0 must be a whole number of bytes, at least 1."),
    (
        {"max_stage_memory": 9, "partition": [3, 3]},
        "max_stage_memory=9 is kept by partition='balanced' only, got partition=[3, 3].",
    ),
    ({"tensor_parallel_size": "auto"}, f"tensor_parallel_size='auto' {AT_LEAST_1}."),
    ({"tensor_parallel_plan": "Auto"}, "tensor_parallel_plan='Auto' is not 'auto' or a dictionary of name patterns"),
    ({"tensor_parallel_plan": {"*.up": 1}}, "tensor_parallel_plan={'*.up': 1} is not 'auto' or a dictionary"),
    ({"tensor_parallel_plan": ["colwise"]}, "tensor_parallel_plan=['colwise'] is not 'auto' or a dictionary"),
    (
        {"tensor_parallel_plan": {"*.up": "colwise", "*.down": "row"}},
        "tensor_parallel_plan['*.down']='row' is not one of 'colwise', 'fused_qkv'",
    ),
    ({"tensor_parallel_size": 2, "sequence_parallel": "both"}, "sequence_parallel='both' is not True, False or 'reg"),
    ({"tensor_parallel_size": 2, "sequence_parallel": 1}, "sequence_parallel=1 is not True, False or 'regather'."),
    ({"sequence_parallel": True}, "sequence_parallel=True needs tensor_parallel_size of at least 2, got 1"),
    ({"expert_parallel_size": 0}, "expert_parallel_size=0 must be a whole number of at least 1."),
    ({"replicate_size": 0}, f"replicate_size=0 {AT_LEAST_1}."),
    (
        {"replicate_size": 2, "zero_stage": 0},
        "replicate_size=2 makes copies of shards, and zero_stage=0 shards nothing.",
    ),
    ({"zero_stage": 4}, "zero_stage=4 is not 0, 1, 2 or 3."),
    ({"zero_stage": "1"}, "zero_stage='1' is not 0, 1, 2 or 3."),
    ({"zero_stage": True}, "zero_stage=True is not 0, 1, 2 or 3."),
    (
        {"reduce_dtype": "half"},
        "reduce_dtype='half' is not one of 'auto', 'float64', 'float32', 'bfloat16', 'float16'.",
    ),
    ({"cpu_offload": 1}, "cpu_offload=1 is not True or False."),
    (
        {"cpu_offload": True, "zero_stage": 0},
        "cpu_offload=True keeps shards in host memory, and zero_stage=0 makes none.",
    ),
    ({"accumulate_on_cpu": 1}, "accumulate_on_cpu=1 is not True or False."),
    ({"pipeline_layers": 7}, "pipeline_layers=7"),
]


@pytest.mark.parametrize(
    ("keywords", "message"), KEYWORDS, ids=lambda value: None if isinstance(value, str) else str(value)
)
def test_keyword_is_refused_at_construction(keywords, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        HybridPTDPStrategy(**keywords)


def test_a_plan_may_leave_modules_to_the_automatic_one():
    plan = {"*": "auto", "*.gelu": "replicated"}
    assert HybridPTDPStrategy(tensor_parallel_plan=plan).options["tensor_parallel_plan"] == plan


def test_misspelt_keyword_is_refused():
    with pytest.raises(TypeError, match="pipeline_size"):
        HybridPTDPStrategy(pipeline_size=2)


class NoBlocks(Small):
    def __init__(self):
        super().__init__()
        self.blocks = self.blocks[0]

    def forward(self, x):
        return self.outlet(self.blocks(self.inlet(x)))


class SharedBlock(Small):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0], self.blocks[1], self.blocks[0]])


class Manual(Small):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(Small):
    def backward(self, loss, *args, **kwargs):
        loss.backward()


class TwoOptimizers(Small):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.inlet.parameters()), torch.optim.Adam(self.blocks.parameters())]


class OneLbfgs(Small):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class ForeignTensor(Small):
    def configure_optimizers(self):
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.zeros(2, 3))], 0.1)


class ReturnsNothing(Small):
    def training_step(self, batch, batch_idx):
        self.loss(batch)


class ReturnsList(Small):
    def training_step(self, batch, batch_idx):
        return [self.loss(batch)]


class ReturnsVector(Small):
    def training_step(self, batch, batch_idx):
        return self(batch[0])


MODELS = [
    (
        Small,
        {"pipeline_layers": "layers"},
        "pipeline_layers='layers' does not exist in the model. Its lists are ['blocks'].",
    ),
    (Small, {"pipeline_layers": ["blocks", "encoder"]}, "pipeline_layers='encoder' does not exist in the model."),
    (
        Small,
        {"pipeline_layers": "inlet"},
        "pipeline_layers='inlet' is a Linear; it must name an nn.ModuleList or nn.Seq",
    ),
    (Small, {"partition": [3, 4]}, "partition=[3, 4] has 2 stages with 7 layers; needed are 2 stages"),
    (Small, {"partition": [2, 2, 2]}, "partition=[2, 2, 2] has 3 stages with 6 layers; needed are 2 stages"),
    (Small, {"block_costs": [1.0] * 5}, "block_costs has 5 numbers and the model 6 blocks, blocks.0 to blocks.5"),
    (Small, {"max_stage_memory": 1000}, "max_stage_memory=1000: no partition of 6 blocks into 2 stages keeps to it."),
    (Small, {"chunks": 4}, "6 layers cannot fill 8 stages, which need one each."),
    (Small, {"chunks": 4, "partition": "uniform"}, "6 layers cannot fill 8 stages"),
    (
        NoBlocks,
        {},
        "pipeline_parallel_size=2 needs blocks to cut between, and the model has no nn.ModuleList or nn.Sequ",
    ),
    (SharedBlock, {}, "blocks holds one module at several positions; the pipeline needs one module for each."),
    (Manual, {}, "automatic_optimization=False: the backward passes belong to the pipeline's schedule, with"),
    (
        OwnBackward,
        {},
        "OwnBackward.backward is overridden, and the pipeline's schedule runs the backward passes itself.",
    ),
    (TwoOptimizers, {}, "multiple optimizers is only supported with manual optimization"),
    (OneLbfgs, {}, "LBFGS evaluates the loss several times a step, which a pipeline's step cannot do."),
    (ForeignTensor, {}, "SGD holds a tensor of shape [2, 3] that is not a parameter of the LightningModule."),
]


def refusals():
    return [refusal(model, options) for model, options, _ in MODELS]


def test_what_does_not_fit_the_model_is_refused_on_every_rank():
    for outcomes in run_trainers(2, refusals):
        for (said, untouched), (_, _, message) in zip(outcomes, MODELS, strict=True):
            assert message in said
            assert untouched


def stop(model, size, **options):
    """On a rank: how a fit ends that was given something else than a loss."""
    with pytest.raises((TypeError, RuntimeError)) as caught:
        fit(model(), loader(8, 4), hybrid(**options))
    return str(caught.value)


@pytest.mark.parametrize("model", [ReturnsNothing, ReturnsList, ReturnsVector], ids=lambda model: model.__name__)
def test_step_without_a_scalar_loss_is_refused_on_every_rank(model):
    for message in run_trainers(2, stop, model, 2, timeout=40):
        assert "without a scalar loss tensor" in message


def test_number_of_processes_that_no_layout_fills_is_refused_on_every_rank():
    for message, untouched in run_trainers(3, refusal, Small, {}):
        assert "world_size=3 is not a multiple of pipeline_parallel_size=2 * tensor_parallel_size=1 = 2." in message
        assert untouched


class Wide(Small):
    """In the default type, which the precision decides."""

    def __init__(self, depth):
        self.depth = depth
        super().__init__()
        self.float()

    def loss(self, batch):
        return super().loss([tensor.to(self.dtype) for tensor in batch])


def layout(depth, precision="32-true", unsplit=False):
    warned = pytest.warns(UserWarning, match="splits nothing: no divisor of") if unsplit else nullcontext()
    with warned if dist.get_rank() == 0 else nullcontext():
        return laid_out(depth, precision)


def laid_out(depth, precision):
    trainer = fit(Wide(depth), loader(8, 4), "hybrid_ptdp", precision=precision)
    layout = trainer.strategy.assembly.engine.mesh.layout
    return (layout.pipeline, layout.data), float(trainer.callback_metrics.get("loss", 0.0)), trainer.global_step


@pytest.mark.parametrize("kind", ["bf16-mixed", "64-true"])
def test_precision_without_a_loss_scale_trains(kind):
    assert run_trainers(2, layout, 2, kind) == [((2, 1), 0.0, 2)] * 2


@pytest.mark.parametrize(
    ("size", "depth", "expected"), [(2, 2, (2, 1)), (2, 1, (1, 2)), (3, 4, (3, 1)), (3, 2, (1, 3))]
)
def test_automatic_pipeline_is_chosen_from_processes_and_blocks(size, depth, expected):
    unsplit = expected[0] == 1 and depth > 1  # with one block there is nothing to split
    assert {found for found, *_ in run_trainers(size, layout, depth, "32-true", unsplit)} == {expected}


@given(world=st.integers(1, 64), num_blocks=st.integers(0, 40))
def test_automatic_pipeline_is_the_smallest_divisor_that_the_blocks_allow(world, num_blocks):
    options = {"pipeline_parallel_size": "auto", "tensor_parallel_size": 1, "num_chunks": 1}
    found = choose_layout(options, [f"blocks.{i}" for i in range(num_blocks)], world)
    assert found.pipeline * found.data == world
    smaller = [size for size in range(2, found.pipeline if found.pipeline > 1 else world + 1) if world % size == 0]
    assert all(size > num_blocks for size in smaller)
    assert found.pipeline == 1 or found.pipeline <= num_blocks


def test_chunks_need_a_pipeline_that_the_processes_make():
    options = {"pipeline_parallel_size": "auto", "tensor_parallel_size": 1, "num_chunks": 2}
    with pytest.raises(ValueError, match="num_chunks=2 needs a pipeline, and 3 processes with 2 blocks make none"):
        choose_layout(options, ["a", "b"], 3)
