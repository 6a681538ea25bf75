import warnings

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.optim import LBFGS, SGD, Adafactor, AdamW, Muon, Rprop

from lightning_hybrid.experts import MoELayer
from lightning_hybrid.optim import Lamb, OptimizerTransition
from lightning_hybrid.parallel.mesh import Layout
from lightning_hybrid.parallel.tensor.assignment import STYLES
from lightning_hybrid.precision import MasterWeights
from lightning_hybrid.strategies.checks import (
    SCHEDULES,
    check_keywords,
    check_module,
    check_steps,
)
from lightning_hybrid.strategies.optimizer_checks import check_optimizers
from lightning_hybrid.strategies.precisions import check_masters

DEFAULTS = {
    "pipeline_parallel_size": "auto",
    "tensor_parallel_size": 1,
    "expert_parallel_size": 1,
    "replicate_size": 1,
    "num_chunks": 1,
    "num_microbatches": "auto",
    "schedule": "auto",
    "pipeline_layers": None,
    "partition": "balanced",
    "zero_stage": 1,
    "cpu_offload": False,
    "reduce_dtype": "auto",
    "accumulate_on_cpu": False,
    "tensor_parallel_plan": "auto",
    "sequence_parallel": False,
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pipeline_parallel_size": 1, "num_microbatches": 1},
        {"pipeline_parallel_size": 8, "num_chunks": 3, "schedule": "gpipe"},
        {"num_chunks": 2, "schedule": "interleaved_1f1b"},
        {"partition": (3, 1), "pipeline_layers": ["encoder.block", "decoder.block"]},
        {"pipeline_layers": ""},  # the root itself
        *({"schedule": schedule} for schedule in SCHEDULES),
        *({"zero_stage": stage} for stage in range(4)),
        {"zero_stage": 3, "replicate_size": 4, "cpu_offload": True, "reduce_dtype": "bfloat16"},
        {"block_costs": [1, 0, 2.5], "max_stage_memory": 1},
        {"block_costs": (1.0,), "partition": "uniform"},
        {"tensor_parallel_size": 3, "sequence_parallel": "regather"},
        {"tensor_parallel_size": 2, "tensor_parallel_plan": dict(zip("abcdefgh", STYLES, strict=True))},
        {"tensor_parallel_plan": {"*.up": "colwise"}},  # one configuration for any size
    ],
)
def test_keywords_in_range_pass(options):
    check_keywords({**DEFAULTS, **options})


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "tensor_parallel_size", "num_chunks", "num_microbatches"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, None, "2", "Auto", [1]])
def test_sizes_are_whole_numbers_of_at_least_one(name, value):
    with pytest.raises(ValueError, match=rf"{name}=.* must be a whole number of at least 1"):
        check_keywords({**DEFAULTS, name: value})


def test_only_two_sizes_can_be_chosen_automatically():
    with pytest.raises(ValueError, match=r"num_chunks='auto' must be a whole number of at least 1\.$"):
        check_keywords({**DEFAULTS, "num_chunks": "auto"})


@pytest.mark.parametrize("value", ["even", [], [0, 2], [1.0, 2], [True, 1], None, 3, ["1"]])
def test_a_partition_has_a_name_or_positive_counts(value):
    with pytest.raises(ValueError, match="is not 'balanced', 'uniform' or a list of block counts"):
        check_keywords({**DEFAULTS, "partition": value})


@pytest.mark.parametrize("value", [[], [None], 3, ["a", 1], {"a"}])
def test_layers_are_named_by_strings(value):
    with pytest.raises(ValueError, match="is not the dotted name of a list of blocks"):
        check_keywords({**DEFAULTS, "pipeline_layers": value})


OPTIONS = {"num_microbatches": "auto", "zero_stage": 0, "accumulate_on_cpu": False}
SHARDED = {**OPTIONS, "zero_stage": 1}


class Manual(LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(LightningModule):
    def backward(self, loss):
        loss.backward()


class Inherits(OwnBackward):
    pass


class Usual(LightningModule):
    def on_after_backward(self):
        pass


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Manual, "automatic_optimization=False.* with pipeline_parallel_size=2 and num_microbatches=auto"),
        (OwnBackward, r"OwnBackward\.backward is"),
        (Inherits, r"Inherits\.backward"),
    ],
)
def test_modules_that_run_the_backward_pass_themselves_are_refused(module, message):
    with pytest.raises(ValueError, match=message):
        check_module(module(), Layout(2, 1), OPTIONS)


def test_usual_modules_and_optimizers_pass():
    check_module(Usual(), Layout(2, 1), {**OPTIONS, "num_microbatches": 4})
    check_module(Manual(), Layout(1, 4), OPTIONS)
    check_module(Manual(), Layout(1, 4), {**OPTIONS, "num_microbatches": 1})
    weight = torch.nn.Parameter(torch.zeros(1))
    check_optimizers([], Usual(), Layout(2, 2), OPTIONS)
    check_optimizers([AdamW([{"params": [weight]}])], Usual(), Layout(2, 2), SHARDED)
    check_optimizers([Adafactor([weight])], Usual(), Layout(2, 2), OPTIONS)
    check_optimizers([Adafactor([weight])], Usual(), Layout(2, 1), SHARDED)


def test_manual_steps_accumulate_as_they_like():
    with pytest.raises(ValueError, match="accumulate_on_cpu=True with automatic_optimization=False"):
        check_module(Manual(), Layout(1, 1), {**OPTIONS, "accumulate_on_cpu": True})


def test_optimizers_that_look_at_whole_matrices_are_refused_where_they_would_see_slices():
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    for optimizer in (Adafactor([weight]), Muon([weight])):
        with pytest.raises(ValueError, match=rf"torch.optim.{type(optimizer).__name__} .* tensor_parallel_size=2"):
            check_optimizers([optimizer], Usual(), Layout(1, 1, 2), OPTIONS)


def test_optimizers_that_look_at_whole_parameters_are_refused_where_these_are_split_experts():
    module = Usual()
    module.layer = MoELayer(4, 4, 2)
    over_experts = Layout(1, 2, expert=2)
    with pytest.raises(ValueError, match=r"torch\.optim\.Adafactor .* expert_parallel_size=2"):
        check_optimizers([Adafactor(module.parameters())], module, over_experts, OPTIONS)
    check_optimizers([Muon(module.layer.router.parameters())], module, over_experts, OPTIONS)
    check_optimizers([Adafactor(module.parameters())], module, Layout(1, 2), OPTIONS)


def test_an_optimizer_of_others_is_warned_of_once_where_it_sees_slices():
    class Mine(torch.optim.SGD):
        pass

    weight = torch.nn.Parameter(torch.zeros(1))
    with pytest.warns(
        UserWarning, match="Mine of .* sees slices of the split parameters with tensor_parallel_size=2"
    ) as seen:
        check_optimizers([Mine([weight]), AdamW([weight])], Usual(), Layout(1, 1, 2), OPTIONS)
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_optimizers([Mine([weight])], Usual(), Layout(1, 2), OPTIONS)


def test_an_optimizer_that_is_told_of_slices_gives_no_warning():
    class Mine(Lamb):
        pass

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_optimizers([Mine([torch.nn.Parameter(torch.zeros(1))])], Usual(), Layout(1, 1, 2), OPTIONS)


def test_optimizers_that_repeat_the_step_are_refused_by_name():
    weight = torch.nn.Parameter(torch.zeros(1))

    class Mine(LBFGS):
        pass

    with pytest.raises(ValueError, match="LBFGS evaluates the loss several times a step"):
        check_optimizers([Mine([weight])], Usual(), Layout(2, 1), OPTIONS)
    for kind in (Adafactor, Rprop):
        with pytest.raises(ValueError, match=rf"{kind.__name__} cannot work on sharded parameters\. Set zero_stage=0"):
            check_optimizers([kind([weight])], Usual(), Layout(2, 2), SHARDED)


def test_both_optimizers_of_a_transition_are_looked_at():
    module = Usual()
    module.layer = MoELayer(4, 4, 2)
    over_experts = Layout(1, 2, expert=2)
    for kind, layout, options in (
        (Adafactor, Layout(2, 2), SHARDED),
        (Rprop, Layout(2, 2), SHARDED),
        (Adafactor, Layout(1, 1, 2), OPTIONS),
        (Adafactor, over_experts, OPTIONS),
    ):
        both = OptimizerTransition(held_by(AdamW, module), held_by(kind, module), float)
        with pytest.raises(ValueError, match=rf"torch\.optim\.{kind.__name__} "):
            check_optimizers([both], module, layout, options)
    with pytest.raises(ValueError, match=r"torch\.optim\.Rprop cannot work on the sharded masters"):
        check_masters(
            MasterWeights(), module, [OptimizerTransition(held_by(Rprop, module), held_by(AdamW, module), float)]
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both = OptimizerTransition(held_by(AdamW, module), held_by(SGD, module), float)
        check_optimizers([both], module, Layout(1, 1, 2), OPTIONS)
        check_optimizers([both], module, over_experts, OPTIONS)


def held_by(kind, module):
    return kind(module.parameters())


@pytest.mark.parametrize("name", ["training_step", "validation_step", "test_step", "predict_step"])
def test_steps_that_fetch_their_own_batches_are_refused_by_name(name):
    module = Usual()
    check_steps(module)
    setattr(module, name, lambda dataloader_iter: None)
    with pytest.raises(ValueError, match=rf"{name}\(self, dataloader_iter\) is not supported"):
        check_steps(module)
