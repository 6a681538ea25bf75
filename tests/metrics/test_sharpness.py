"""Sharpness against closed forms and rescaling; what both metrics of the loss's surface leave alone, and refuse."""

import copy

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

from lightning_hybrid.experts import MoELayer
from lightning_hybrid.metrics import HessianTopEigenvalue, Sharpness
from tests.launch import run_ranks, run_trainers
from tests.metrics.surfaces import Measured, Quadratic, Unmeasured, drawn, measure, measure_all
from tests.small import WIDTH, Block, Small, hybrid, loader, trainer_of

TENSOR = {"tensor_parallel_size": 2, "tensor_parallel_plan": {"blocks.*.linear": "colwise"}}
KINDS = ("box", "scale_invariant")


def value_of(metric, module, *terms, **options):
    for term in terms or (module.loss,):
        metric.update(module, term, **options)
    return float(metric.compute())


@pytest.mark.parametrize("kind", KINDS)
def test_sharpness_of_a_separable_quadratic_is_its_closed_form(kind):
    x, curvatures = drawn(6), drawn(6, seed=1).square()
    sides = 1e-2 * (x.abs() + (kind == "box"))
    centre, highest = (float((curvatures * (x.abs() + side).square()).sum()) / 2 for side in (0, sides))
    found = value_of(Sharpness(1e-2, kind), Quadratic(x, curvatures.diag()))
    assert found == pytest.approx(100 * (highest - centre) / (1 + centre), rel=1e-9)


class Rectified(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 7).double(), nn.Linear(7, 3).double()
        self.x, self.y = drawn(20, 5), drawn(20, 3, seed=1)

    def loss(self):
        return F.mse_loss(self.second(self.first(self.x).relu()), self.y)


def test_rescaled_network_has_another_sharpness_in_the_box_and_the_same_in_the_relative_one():
    plain, scaled = Rectified(), Rectified()
    with torch.no_grad():
        scaled.first.weight *= 8  # powers of two scale to the bit
        scaled.first.bias *= 8
        scaled.second.weight /= 8
    values = {kind: [value_of(Sharpness(0.05, kind), net) for net in (plain, scaled)] for kind in KINDS}
    assert plain.loss() == scaled.loss()
    assert values["scale_invariant"][0] == values["scale_invariant"][1] > 1
    assert values["box"][1] > 3 * values["box"][0]


def test_batches_count_by_their_weights_until_reset():
    small, large = Quadratic(drawn(4), drawn(4).square().diag()), drawn(4, seed=1).square().diag()
    together = Quadratic(drawn(4), (small.hessian + 3 * large) / 4)
    metric = Sharpness()
    metric.update(small, small.loss, weight=2)
    metric.update(small, lambda matrix: _with(small, matrix), large, weight=6)
    assert float(metric.compute()) == pytest.approx(value_of(Sharpness(), together), rel=1e-12)
    metric.reset()
    assert value_of(metric, small) == value_of(Sharpness(), small)
    metric.reset()
    with pytest.warns(UserWarning, match="before the ``update`` method"):
        assert metric.compute().isnan()


def _with(module, hessian):
    x = torch.cat([module.first, module.rest])
    return x @ hessian @ x / 2


def test_autocast_does_not_round_the_moves_away():
    module = Rectified().float()
    module.x, module.y = module.x.float(), module.y.float()
    exact = value_of(Sharpness(), module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert value_of(Sharpness(), module) == exact > 0


class Stateful(nn.Module):
    """Batch norm in training, a frozen weight, a counter and gradients of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.frozen, self.last = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.frozen.requires_grad_(False)
        self.x, self.calls, self.fails_at = torch.randn(8, 4), 0, None
        self.loss().backward()

    def loss(self):
        self.calls += 1
        if self.calls == self.fails_at:
            raise OSError("no data")
        return self.last(torch.tanh(self.frozen(self.norm(self.x)))).square().mean()


def _state(module):
    gradients = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    return copy.deepcopy((module.state_dict(), gradients, module.calls, torch.get_rng_state()))


@pytest.mark.parametrize("metric", [Sharpness(0.1), HessianTopEigenvalue(iterations=200, tolerance=0.01)])
def test_everything_is_to_the_bit_as_before_also_behind_an_error(metric):
    module = Stateful()
    before, frozen = _state(module), module.frozen.weight.clone()
    metric.update(module, module.loss)
    metric.compute()
    assert_close(_state(module), before, rtol=0, atol=0)
    metric.reset()
    module.fails_at = module.calls + 4  # in the middle of the measure
    metric.update(module, module.loss)
    with pytest.raises(OSError, match="no data"):
        metric.compute()
    assert_close(_state(module), before, rtol=0, atol=0)
    assert_close(module.frozen.weight, frozen, rtol=0, atol=0)


class Captured(Small):
    def __init__(self):
        super().__init__()
        self.box = Sharpness()

    def validation_step(self, batch, batch_idx):
        self.box.update(self, lambda: self.loss(batch))
        self.log("box", self.box)


def test_batches_of_inference_mode_are_copied_or_refused():
    options = {"limit_val_batches": 1}
    with pytest.raises(RuntimeError, match=r"made in inference mode. Give the batch to update, as in Sharpness.update"):
        trainer_of(**options).validate(Captured(), loader(4, 4), verbose=False)
    outcomes = [trainer_of(inference_mode=False, **options).validate(Captured(), loader(4, 4), verbose=False)]
    outcomes.append(trainer_of(**options).validate(Measured(), loader(4, 4), verbose=False))
    assert all(outcome[0]["box"] > 0 for outcome in outcomes)


def test_every_layout_measures_what_one_process_does_and_trains_on_as_without():
    """Of 13 samples the replicas have four batches and three; ddp's sampler would repeat one of them."""
    tasks = [("ddp", 14), (0, 13), (1, 13), (2, 13), (2, 13, Unmeasured)]
    expected = {number: measure("auto", number) for number in (13, 14)}
    outcomes = run_trainers(2, measure_all, tasks, timeout=120)
    for task, (values, states), (values_of_last, _) in zip(tasks, *outcomes, strict=True):
        reference, weights = expected[task[1]]
        assert values == values_of_last
        assert_close(states, weights, rtol=1e-12, atol=1e-14)
        if len(task) == 2:
            assert set(values) == {"box", "relative", "top"}
            assert values == pytest.approx(reference, rel=1e-9)
    assert_close(outcomes[0][3][1], outcomes[0][4][1], rtol=0, atol=0)
    assert_close(measure("auto", 13, Unmeasured)[1], expected[13][1], rtol=0, atol=0)


class Mixed(Block):
    """A block with a mixture, whose matrices can be dealt out."""

    def __init__(self):
        super().__init__()
        self.mixture = MoELayer(WIDTH, 4, 2)

    def forward(self, x):
        return super().forward(x) + self.mixture(x)


class Dealt(Measured):
    block = Mixed


def refusals(tasks):
    """On a rank: what fits say, and how far they have come."""
    said = []
    for precision, options in tasks:
        trainer = trainer_of(hybrid(**{"pipeline": 1, "microbatches": 1, **options}), precision=precision)
        with pytest.raises((RuntimeError, ValueError)) as caught:
            trainer.fit(Dealt().to(torch.get_default_dtype()), *[loader(8, 4)] * 2)
        said.append((str(caught.value), trainer.global_step))
    return said


def test_layouts_without_a_whole_model_are_refused_by_name_before_training():
    tasks = {
        "With pipeline_parallel_size=2 no rank has": (None, {"pipeline": 2}),
        "With tensor_parallel_size=2 no rank has": (None, TENSOR),
        "With expert_parallel_size=2 no rank has": (None, {"expert_parallel_size": 2}),
        "With zero_stage=3 no rank has": (None, {"zero_stage": 3}),
        "Steps see parameters and batches as torch.float16": ("16-true", {"zero_stage": 0}),
    }
    for outcomes in run_trainers(2, refusals, list(tasks.values()), timeout=120):
        for (message, steps), beginning in zip(outcomes, tasks, strict=True):
            assert beginning in message
            assert "cannot be cut" not in message
            assert "Measure a checkpoint in one process: module = MyModule.load_from_checkpoint" in message
            assert steps == 0


def parts_and_strangers():
    """On a rank: what is said of shards, of other parameters elsewhere, and of a rank without a batch."""
    rank, messages = torch.distributed.get_rank(), []
    sharded, other, same = nn.Linear(4, 4), nn.Linear(4, 4), Stateful()
    fully_shard(sharded, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    with torch.no_grad():
        other.weight.fill_(rank)
    for module, has_batch in ((sharded, True), (other, True), (same, rank == 0)):
        metric = Sharpness()
        try:
            if has_batch:
                metric.update(module, module.weight.square().sum if module is not same else same.loss)
            metric.compute()
        except ValueError as error:
            messages.append(str(error))
    return messages


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric Sharpness was called before")
def test_ranks_that_do_not_fit_together_are_refused_on_all_of_them():
    for messages in run_ranks(2, parts_and_strangers):
        assert "fully_shard deals parameters out" in messages[0]
        assert "Ranks have different parameters: here 2 with the sum" in messages[1]
        assert "Ranks [1] have no batch for Sharpness" in messages[2]


def test_strategies_that_shard_are_refused_at_the_first_batch():
    module = LightningModule()
    module.weight = nn.Parameter(torch.ones(2))
    module.trainer = Trainer(accelerator="cpu", devices=1, strategy=ModelParallelStrategy(), logger=False)
    with pytest.raises(ValueError, match=r"ModelParallelStrategy deals parameters out.*MyModule.load_from_checkpoint"):
        Sharpness().update(module, lambda: module.weight.sum())


def test_modules_that_cannot_be_moved_are_refused():
    def refuse(module, message, closure=None):
        with pytest.raises((ValueError, TypeError), match=message):
            value_of(HessianTopEigenvalue(), module, closure or (lambda: module.weight.sum()))

    net = nn.Linear(16, 16)
    refuse(nn.Linear(2, 2, dtype=torch.bfloat16), r"weight is torch.bfloat16, .* copy.deepcopy\(module\).float\(\)")
    refuse(nn.Linear(2, 2, device="meta"), r"weight is not whole here")
    refuse(nn.ReLU(), "ReLU has no parameter with requires_grad=True")
    tied = nn.Linear(2, 2)
    tied.copy = nn.Parameter(tied.weight.detach())
    refuse(tied, "Two parameters share memory")
    refuse(net, r"returned \d.* and then .* call module.eval\(\)", lambda: F.dropout(net.weight, 0.5).square().sum())
    refuse(net, "The closure returned 3.*: it has to return the loss", lambda: 3)
    refuse(net, "closure=7 cannot be called", 7)


def test_keywords_and_calls_are_checked():
    for options, message in (
        ({"epsilon": 0.0}, "epsilon=0.0 must be finite and above 0"),
        ({"kind": "ball"}, "kind='ball' is neither of 'box', 'scale_invariant'"),
        ({"steps": 0}, "steps=0 must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            Sharpness(**options)
    metric, net, other = Sharpness(), nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"Call Sharpness.update, and give self.log the metric itself"):
        metric(net, net.forward)
    with pytest.raises(ValueError, match="weight=0 must be finite and above 0"):
        metric.update(net, net.forward, weight=0)
    metric.update(net, lambda: net.weight.sum() - 9)
    with pytest.raises(ValueError, match=r"Sharpness has batches of another module. Call reset\(\)"):
        metric.update(other, other.forward)
    with pytest.raises(ValueError, match="Measure a loss that is above -1"):
        metric.compute()
