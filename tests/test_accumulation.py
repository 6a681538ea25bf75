"""Gradients that accumulate in host memory, and norms of gradients that can be logged."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import grad_norm
from torch.testing import assert_close

from tests.launch import run_trainers
from tests.small import fit, hybrid, loader, weights
from tests.test_zero import BATCH, BATCHES, Choosy, Frozen, Model, Odd

OPTIONS = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}
LAYOUTS = {
    1: [{"pipeline": 1, "microbatches": 1}, {"pipeline": 1, "zero_stage": 2, "cpu_offload": True}],
    2: [{"pipeline": 1, "zero_stage": stage} for stage in range(4)]
    + [{"pipeline": 1, "zero_stage": 3, "cpu_offload": True}, {"pipeline": 2, "chunks": 2}],
    4: [{"pipeline": 2, "zero_stage": stage} for stage in range(4)]
    + [{"pipeline": 1, "zero_stage": 1, "replicate_size": 2}],
}


class Between(Callback):
    """What is left on the device between the batches of a window, and what is on the host."""

    def __init__(self):
        self.left, self.kept = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        engine = trainer.strategy.assembly.engine
        self.left.append(sum(p.grad is not None for p in engine.local_parameters()))
        self.kept.append(engine.accumulation.num_bytes())


def trained(model, layouts, data):
    found = []
    for layout in layouts:
        replicas, between = data // layout["pipeline"], Between()
        strategy = hybrid(**layout, accumulate_on_cpu=True)
        options = {"callbacks": [between], "max_epochs": model.epochs, **OPTIONS}
        trainer = fit(model(), loader(BATCHES * BATCH, BATCH, replicas), strategy, **options)
        found.append((weights(trainer), between.left, between.kept))
    return found


@pytest.mark.parametrize("model", [Odd, Frozen])
@pytest.mark.parametrize("size", LAYOUTS)
def test_gradients_that_wait_on_the_host_are_those_of_one_process(size, model):
    expected = weights(fit(model(), loader(BATCHES * BATCH, BATCH), max_epochs=model.epochs, **OPTIONS))
    for state, left, kept in run_trainers(size, trained, model, LAYOUTS[size], size, timeout=200)[0]:
        assert_close(state, expected, rtol=1e-9, atol=1e-12)
        within, ends = range(2), (2, 5)
        assert [left[i] for i in within] == [0, 0], "the device holds no gradients between batches"
        assert model is Frozen or all(kept[i] > 0 for i in within)  # a stage may have no trainable parameters
        assert all(kept[i] == 0 for i in ends), "and the host none after a step"


def choosy(stages):
    train = loader(BATCHES * BATCH, BATCH, 2)
    strategies = [hybrid(1, microbatches=1, zero_stage=stage, accumulate_on_cpu=host) for stage, host in stages]
    return [weights(fit(Choosy(), train, strategy, accumulate_grad_batches=2)) for strategy in strategies]


def test_a_parameter_may_get_gradients_in_one_batch_of_a_window_only():
    plain, *others = run_trainers(2, choosy, [(0, False), *((stage, True) for stage in range(4))])[0]
    for state in others:
        assert_close(state, plain, rtol=1e-9, atol=1e-12)


def shards_on_the_host(data):
    between = Between()
    strategy = hybrid(1, zero_stage=1, accumulate_on_cpu=True)
    trainer = fit(Model(), loader(2 * BATCH, BATCH, data), strategy, callbacks=[between], accumulate_grad_batches=2)
    return between.kept[0], sum(p.numel() * 8 for p in Model().parameters()), trainer.global_step


def test_a_rank_of_zero_1_keeps_the_gradients_of_its_shards_alone():
    ranks = run_trainers(2, shards_on_the_host, 2)
    assert sum(kept for kept, _, _ in ranks) == ranks[0][1]
    assert all(0 < kept < size and steps == 1 for kept, size, steps in ranks)


class Logging(Model):
    """Logs both norms."""

    def on_before_optimizer_step(self, optimizer):
        self.log("norm", self.trainer.strategy.gradient_norm(optimizer))

    def on_before_zero_grad(self, optimizer):
        if self.trainer.strategy.last_gradient_norm is not None:
            self.log("clipped", self.trainer.strategy.last_gradient_norm)


class Norms(Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (batch_idx + 1) % 3 == 0:
            self.seen.append(float(trainer.logged_metrics["norm"]))


def norms(layouts, data):
    found = []
    for layout in layouts:
        seen = Norms()
        replicas = data // layout["pipeline"]
        trainer = fit(
            Logging(), loader(BATCHES * BATCH, BATCH, replicas), hybrid(**layout), callbacks=[seen], **OPTIONS
        )
        found.append((seen.seen, float(trainer.logged_metrics["clipped"]), trainer.strategy.last_gradient_norm.dtype))
    return found


@pytest.mark.filterwarnings("ignore:.*clipped.*")
def test_norms_of_the_whole_model_can_be_logged():
    (expected,) = run_trainers(1, norms, [{"pipeline": 1, "microbatches": 1}], 1)[0]
    assert len(expected[0]) == 2
    for size in (2, 4):
        for rank in run_trainers(size, norms, LAYOUTS[size][-2:], size):
            for seen, last, dtype in rank:
                assert seen == pytest.approx(expected[0], rel=1e-9)
                assert last == pytest.approx(expected[1], rel=1e-9)
                assert dtype == torch.float64


class ByLightning(Odd):
    """Logs what Lightning's documentation shows."""

    def on_before_optimizer_step(self, optimizer):
        self.log_dict(grad_norm(self, 2))


def by_lightning(stages, data):
    train = loader(2 * BATCH, BATCH, data)
    trainers = [fit(ByLightning(), train, hybrid(1, microbatches=1, zero_stage=stage)) for stage in stages]
    return [{name: float(value) for name, value in trainer.logged_metrics.items()} for trainer in trainers]


@pytest.mark.filterwarnings("ignore:on_before_optimizer_step takes a norm")
def test_lightnings_norms_are_those_of_whole_gradients_where_they_are_sharded():
    (expected,) = run_trainers(1, by_lightning, [0], 1)[0]
    assert expected["grad_2.0_norm_total"] > 0
    for rank in run_trainers(2, by_lightning, [1, 2, 3], 2):
        assert all(found == pytest.approx(expected, rel=1e-6) for found in rank)  # float32 in the total
