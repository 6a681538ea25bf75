"""Optimizers restart under a Trainer when they are asked to, in every layout, and go on from checkpoints."""

import logging
import math

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, ExponentialLR, LinearLR, SequentialLR
from torch.testing import assert_close

from lightning_hybrid.callbacks import GradientNoise, OptimizerRestart
from lightning_hybrid.callbacks.rate_factors import RateFactors
from tests.callbacks.test_gradient_noise import Parts, batches
from tests.launch import run_trainers
from tests.optim.layouts import Row
from tests.small import Small, hybrid, loader, trainer_of, weights


class Scheduled(Small):
    """Adam under a schedule; eight steps in four epochs."""

    depth = 1

    def __init__(self, schedule=None, interval="step"):
        super().__init__()
        self.schedule, self.interval = schedule, interval

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), 0.1)
        if self.schedule is None:
            return optimizer
        return [optimizer], [{"scheduler": self.schedule(optimizer), "interval": self.interval}]


class Watch(Callback):
    """Steps, from 0, that begin without a state, and the rates of all."""

    def __init__(self):
        self.fresh, self.rates, self.logged = [], [], []

    def on_fit_start(self, trainer, pl_module):
        RateFactors.of(trainer.optimizers[0])

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if not optimizer.state:
            self.fresh.append(trainer.global_step)

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.rates += RateFactors.of(trainer.optimizers[0]).effective_rates
        self.logged.append(trainer.callback_metrics.get("restarts"))


def cosine(first, factor=1):
    return lambda optimizer: CosineAnnealingWarmRestarts(optimizer, first, factor)


def watched(restart, *schedule):
    watch = Watch()
    trainer = trainer_of(callbacks=[restart, watch], max_epochs=4, log_every_n_steps=1)
    trainer.fit(Scheduled(*schedule), loader(8, 4))
    return watch


@pytest.mark.parametrize(
    ("options", "schedule", "expected"),
    [
        ({"every": 3}, (), [0, 3, 6]),
        ({"every": 1}, (), list(range(8))),
        ({"at": [5, 2, 8]}, (), [0, 2, 5]),
        ({"when": lambda trainer, module: trainer.global_step in (4, 5)}, (), [0, 4, 5]),
        ({}, (cosine(3),), [0, 3, 6]),
        ({}, (cosine(2, 2),), [0, 2, 6]),
        ({}, (cosine(1),), list(range(8))),
        ({}, (cosine(1, 2), "epoch"), [0, 2, 6]),
        ({"every": 5}, (cosine(2),), [0, 5]),
    ],
)
def test_the_step_after_the_moment_begins_without_a_state(options, schedule, expected):
    watch = watched(OptimizerRestart(**options), *schedule)
    assert watch.fresh == expected
    assert watch.logged[-1] == len(expected) - 1  # the first step has none to forget
    if schedule and not options:
        assert all(watch.rates[step] == 0.1 for step in expected)  # where the schedule restarts


def test_rates_grow_again_after_each_restart_and_the_schedule_does_not_know():
    watch = watched(OptimizerRestart(rewarm=(2, 0.5)), cosine(3))
    factors = [1, 1, 1, 0.5, 0.75, 1, 0.5, 0.75]
    expected = [f * 0.1 * (1 + math.cos(math.pi * (step % 3) / 3)) / 2 for step, f in enumerate(factors)]
    assert watch.rates == pytest.approx(expected, rel=1e-12)
    assert watched(OptimizerRestart(every=3, rewarm=1)).rates == pytest.approx([0.1, 0.1, 0.1, 0, 0.1, 0.1, 0, 0.1])


def test_it_is_told_once(caplog):
    with caplog.at_level(logging.INFO):
        watched(OptimizerRestart(every=3, keys=["exp_avg", "exp_avg_sq"]))
    told = [record.message for record in caplog.records if "OptimizerRestart" in record.message]
    assert told == ["OptimizerRestart clears exp_avg, exp_avg_sq of Adam after 3 applied steps."]


def test_a_fit_that_ends_before_the_first_restart_says_so(caplog):
    with caplog.at_level(logging.INFO):
        watched(OptimizerRestart(every=1000))
        watched(OptimizerRestart(when=lambda *_: False))
    told = [record.message for record in caplog.records if "OptimizerRestart" in record.message]
    assert told == ["OptimizerRestart has cleared nothing: 8 steps were applied."]


class Accumulating(Parts):
    """What its optimizer accumulates, it has from its constructor."""

    def configure_optimizers(self):
        optimizer = torch.optim.Adagrad(self.parameters(), 0.1, initial_accumulator_value=0.1)
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"}]


class Moving(Parts):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.02, eps=1e-3)


class Wide(Small):
    """Parts that two axes of ModelParallelStrategy deal out, on one dimension and on two."""

    configure_optimizers = Accumulating.configure_optimizers

    def configure_model(self):
        mesh, plan = self.device_mesh, {"inlet": ColwiseParallel(), "blocks.0.linear": RowwiseParallel()}
        parallelize_module(self, mesh["tensor_parallel"], plan)
        fully_shard(self, mesh=mesh["data_parallel"])

    def forward(self, x):
        return 2 * self.outlet(self.blocks[0].linear(torch.tanh(self.inlet(x))))  # fully_shard warns of views


class Whole(Wide):
    configure_model = Small.configure_model


def on_the_last_rank(trainer, pl_module):
    return trainer.global_step in (1, 2) and trainer.global_rank == trainer.world_size - 1


KINDS = {  # model, and when and what is cleared
    "all": (Accumulating, {"at": [1, 2], "rewarm": (2, 0.25)}),
    "some": (Moving, {"when": on_the_last_rank, "keys": ["exp_avg", "step"]}),
}


def train(kind, strategy="auto", replicas=1, rank=0, epochs=2, resume=None, noise=(0.1,), module=None, clip=0.5):
    """The Trainer after some epochs of two steps."""
    model, options = KINDS[kind]
    trainer = trainer_of(
        strategy,
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=clip,
        callbacks=[*map(GradientNoise, noise), OptimizerRestart(**options)],
    )
    trainer.fit((module or model)(), batches(rank, replicas), ckpt_path=resume)
    assert trainer.callbacks[-1].restarts == (2 if epochs == 2 else 1)
    return trainer


def by_hand():
    """Weights of the first kind with new optimizers, and rates that are given to them."""
    module, samples = Accumulating(), iter([*batches(), *batches()])
    for step, factor in enumerate((1, 0.25, 0.25, 0.625)):
        if step < 3:
            optimizer = torch.optim.Adagrad(module.parameters(), initial_accumulator_value=0.1)
        optimizer.param_groups[0]["lr"] = 0.1 * 0.9**step * factor
        optimizer.zero_grad()
        for _ in range(2):
            (module.loss(next(samples)) / 2).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
    return module.state_dict()


TASKS = [
    ("some", None),  # stock DDP
    ("all", Row(data=2, expert=2, zero=3)),
    ("some", Row(data=2, pipeline=2, zero=1)),
]


def by_task(tasks):
    """On a rank: weights of kinds under layouts."""
    ranks = dist.get_rank() % 2
    return [dict(weights(train(kind, row.strategy() if row else "ddp", 2, ranks))) for kind, row in tasks]


def test_every_layout_gives_the_numbers_of_one_process_with_noise_too():
    assert_close(dict(weights(train("all", noise=()))), dict(by_hand()), rtol=1e-12, atol=1e-14)
    for size in (2, 4):
        tasks = [task for task in TASKS if (task[1].size if task[1] else 2) == size]
        for (kind, row), found in zip(tasks, run_trainers(size, by_task, tasks)[0], strict=True):
            about, expected = f"{kind} {row or 'ddp'}", dict(weights(train(kind)))
            assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=lambda text, at=about: f"{at}: {text}")


def in_two_dimensions():
    """On a rank: weights of stock ModelParallelStrategy, where gradients and states are DTensors; their placements."""
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)
    module = train("all", strategy, 2, dist.get_rank() // 2, module=Wide, clip=None).lightning_module
    kinds = {str(p.placements) for p in module.parameters() if isinstance(p, DTensor)}
    return {name: parameter.full_tensor().detach() for name, parameter in module.named_parameters()}, kinds


def test_shards_of_stock_strategies_in_two_dimensions_are_cleared_and_get_their_noise():
    expected = dict(weights(train("all", module=Whole, clip=None)))
    for found, kinds in run_trainers(4, in_two_dimensions):
        assert any("Strided" in kind for kind in kinds)
        assert_close(found, expected, rtol=1e-9, atol=1e-12)


def resumed(kind, folder, *place, row=None):
    """Weights of a run, and of one that was saved in its middle."""
    found = []
    path = folder / f"{kind}.ckpt"
    for epochs, resume in ((2, None), (1, None), (2, path)):
        trainer = train(kind, row.strategy() if row else "auto", *place, epochs=epochs, resume=resume)
        found.append(dict(weights(trainer)))
        if epochs == 1:
            trainer.save_checkpoint(path)
    return found[0], found[2]


def resumed_in_shards(folder):
    """On a rank: the same in ZeRO's third stage, which loads states with the first batch."""
    return resumed("all", folder, 2, dist.get_rank(), row=Row(data=2, zero=3))


def test_a_resumed_run_restarts_and_warms_up_as_the_one_that_was_not_interrupted(tmp_path):
    """Saved when a warm-up is under way and the next restart is due."""
    pairs = [resumed(kind, tmp_path) for kind in KINDS]
    for whole, rest in [*pairs, run_trainers(2, resumed_in_shards, tmp_path)[0]]:
        assert_close(rest, whole, rtol=0, atol=0)


def test_a_run_that_ends_with_a_cycle_restarts_when_it_goes_on(tmp_path):
    found = []
    for epochs, resume in ((4, None), (2, None), (4, tmp_path / "cycle.ckpt")):
        watch = Watch()
        trainer = trainer_of(callbacks=[OptimizerRestart(), watch], max_epochs=epochs)
        trainer.fit(Scheduled(cosine(2), "epoch"), loader(8, 4), ckpt_path=resume)
        if epochs == 2:
            trainer.save_checkpoint(tmp_path / "cycle.ckpt")
        found.append((watch.fresh, dict(weights(trainer))))
    (fresh, whole), _, (fresh_rest, rest) = found
    assert (fresh, fresh_rest) == ([0, 4], [4])
    assert_close(rest, whole, rtol=0, atol=0)


class HalfMoving(Small):
    """Momentum in the last blocks alone."""

    def configure_optimizers(self):
        first = [*self.inlet.parameters(), *self.blocks[:3].parameters()]
        last = [*self.outlet.parameters(), *self.blocks[3:].parameters()]
        return torch.optim.SGD([{"params": first}, {"params": last, "momentum": 0.9}], 0.1)


def some_keys():
    """On a rank: restarts of a key that one stage has none of, and what is said of one that nobody has."""
    restarts = OptimizerRestart(every=1, keys=["momentum_buffer"]), OptimizerRestart(every=1, keys=["exp_avg"])
    trainer_of(hybrid(), callbacks=[restarts[0]]).fit(HalfMoving(), loader(8, 4))
    with pytest.raises(ValueError, match="SGD keeps no") as caught:
        trainer_of(hybrid(), callbacks=[restarts[1]]).fit(HalfMoving(), loader(8, 4))
    return restarts[0].restarts, str(caught.value)


def test_keys_that_no_rank_has_are_refused_after_the_first_step():
    for restarts, message in run_trainers(2, some_keys):
        assert restarts == 1
        assert "OptimizerRestart(keys=['exp_avg']): SGD keeps no 'exp_avg', but [" in message
    with pytest.raises(ValueError, match=r"Adam keeps no 'exp', but \['exp_avg', 'exp_avg_sq', 'step'\]\. Name some"):
        watched(OptimizerRestart(every=100, keys=["exp"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0 must be a whole number of steps of at least 1"),
        ({"every": 1, "at": [3]}, "every and at are given. Keep one of them"),
        ({"at": []}, r"at=\[\] must be a list of numbers of steps"),
        ({"at": iter([1, 3])}, "must be a list of numbers of steps"),
        ({"at": 3.0}, "at=3.0 must be a list of numbers of steps"),
        ({"at": [2, 0]}, "each number in at=0 must be a whole number of steps of at least 1"),
        ({"when": "loss"}, "when='loss' must be a function of the Trainer"),
        ({"keys": "exp_avg"}, "keys='exp_avg' must be a list of names"),
        ({"keys": iter(["exp_avg"])}, "must be a list of names"),
        ({"keys": 3}, "keys=3 must be a list of names"),
        ({"keys": []}, r"keys=\[\] must be a list of names"),
        ({"rewarm": 0}, "rewarm's number=0 must be a whole number of steps"),
        ({"rewarm": (3, 1.5)}, r"rewarm=\(3, 1.5\) must begin with a factor from 0 to 1"),
        ({"rewarm": (3, 0.1, 2)}, r"rewarm=\(3, 0.1, 2\) must be a number of steps, or \(steps, factor\)"),
    ],
)
def test_arguments_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        OptimizerRestart(**options)


def warmed(optimizer):
    return SequentialLR(optimizer, [LinearLR(optimizer), CosineAnnealingWarmRestarts(optimizer, 3)], [2])


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # of SequentialLR's own
def test_what_cannot_restart_is_refused_before_training():
    for schedule in ((), (warmed,)):
        with pytest.raises(ValueError, match=r"returned none \(one within a SequentialLR does not count.* give every"):
            watched(OptimizerRestart(), *schedule)
    trainer = trainer_of()
    with pytest.raises(ValueError, match="has returned no optimizer that OptimizerRestart could restart"):
        OptimizerRestart(every=1).on_fit_start(trainer, Small())
    trainer.strategy.__class__ = DeepSpeedStrategy  # to make one, DeepSpeed must be there
    with pytest.raises(ValueError, match=r"cannot work under DeepSpeedStrategy.*strategy='hybrid_ptdp'"):
        OptimizerRestart(every=1).on_fit_start(trainer, Small())
