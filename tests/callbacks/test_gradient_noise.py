"""Noise on gradients under a Trainer: by its equations step by step, and the same in every layout."""

import math
import re

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing import assert_close

from lightning_hybrid.callbacks import GradientNoise, OptimizerRestart
from lightning_hybrid.functional.boxes import Box
from lightning_hybrid.functional.noise import add_noise
from lightning_hybrid.parallel.gradient_parts import shard_box
from lightning_hybrid.precision import FP16MasterWeights
from tests.launch import run_ranks, run_trainers
from tests.optim.layouts import Part, Row
from tests.precision.test_fp16 import Poisoned, plugin
from tests.small import Small, hybrid, trainer_of, weights
from tests.small import loader as small_loader
from tests.test_expert_parity import data, loader

ETA, GAMMA, SEED, CLIP = 0.3, 0.55, 5, 0.7
BATCH, STEPS = 8, 4  # samples of a batch, of which each step has two, and steps, of which each epoch has two
BOUND = 5  # standard errors


def noise_of(name, like, step, eta=ETA, seed=SEED):
    """What equations 1 and 2 add to a gradient in a step."""
    found = torch.zeros_like(like)
    add_noise(found, like.shape, Box.of(like.shape), math.sqrt(eta / (1 + step) ** GAMMA), (seed, name, step))
    return found


class Flat(Small):
    """Gradients of zero: what moves the weights is noise."""

    def __init__(self):
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.zeros(2**16, dtype=torch.float64)) for _ in range(2))
        self.idle, self.seen = nn.Parameter(torch.ones(3)), []

    def training_step(self, batch, batch_idx):
        return (self.one + self.two).sum() * 0

    def configure_optimizers(self):
        return torch.optim.SGD([self.one, self.two, self.idle], lr=1.0)

    def on_train_batch_end(self, *args):
        self.seen.append((self.one.detach().clone(), self.two.detach().clone()))


def test_each_step_adds_the_variance_of_the_equation_to_each_parameter():
    module, callback = Flat(), GradientNoise(ETA, GAMMA, SEED)
    trainer_of(callbacks=[callback]).fit(module, small_loader(12, 4))
    before, noises = (torch.zeros(2**16),) * 2, []
    for step, after in enumerate(module.seen):
        for start, end in zip(before, after, strict=True):
            noise = start - end
            noises.append(noise / noise.square().mean().sqrt())
            variance = ETA / math.pow(1 + step, GAMMA)
            assert float(noise.square().mean()) == pytest.approx(variance, rel=BOUND * math.sqrt(2 / 2**16))
        before = after
    products = (torch.stack(noises) @ torch.stack(noises).T / 2**16).fill_diagonal_(0)  # of parameters, and of steps
    assert products.abs().max() < BOUND / math.sqrt(2**16)
    assert torch.equal(module.idle, torch.ones(3))
    assert callback.steps == [3]


class Parts(Small):
    """Everything that layouts deal out, and a head that is tied to the inlet."""

    block, depth = Part, 2

    def __init__(self):
        super().__init__()
        self.second = nn.Linear(self.inlet.in_features, self.inlet.out_features, bias=False).double()
        self.second.weight = self.inlet.weight
        for block in self.blocks:
            block.mixture.coefficient = 0.0  # Lightning does not divide auxiliary losses by the batches of a window

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(self.second(x))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.2, momentum=0.9)


def batches(rank=0, replicas=1):
    return loader(data(4 * BATCH), rank, replicas, BATCH)


def train(strategy="auto", replicas=1, rank=0, epochs=2, module=Parts, resume=None, **options):
    """The Trainer after some epochs."""
    given = {"callbacks": [GradientNoise(ETA, GAMMA, SEED)], "gradient_clip_val": CLIP, **options}
    trainer = trainer_of(strategy, max_epochs=epochs, accumulate_grad_batches=2, **given)
    trainer.fit(module(), batches(rank, replicas), ckpt_path=resume)
    return trainer


def by_hand():
    """Weights when gradients of a window are averaged, made noisy, clipped and applied, in this order."""
    module, samples = Parts(), iter([*batches(), *batches()])
    optimizer = module.configure_optimizers()
    for step in range(STEPS):
        optimizer.zero_grad()
        for _ in range(2):
            (module.loss(next(samples)) / 2).backward()
        for name, parameter in module.named_parameters():
            parameter.grad += noise_of(name, parameter, step)
        assert nn.utils.clip_grad_norm_(module.parameters(), CLIP) > CLIP
        optimizer.step()
    return module.state_dict()


ROWS = [
    None,  # stock DDP
    Row(data=2, expert=2, zero=3),
    Row(data=2, pipeline=2),
    Row(data=2, tensor=2, zero=1),
]


def by_row(rows):
    """On a rank: weights under each layout."""
    found = []
    for row in rows:
        rank = dist.get_rank() // (row.tensor if row else 1) % 2
        found.append(dict(weights(train(row.strategy() if row else "ddp", 2, rank))))
    return found


def test_every_layout_gives_the_numbers_of_equations_by_hand():
    expected = by_hand()
    assert_close(dict(weights(train())), dict(expected), rtol=1e-12, atol=1e-14)
    for size in (2, 4):
        rows = [row for row in ROWS if (row.size if row else 2) == size]
        for row, found in zip(rows, run_trainers(size, by_row, rows)[0], strict=True):
            about = row or "ddp"
            assert_close(found, dict(expected), rtol=1e-9, atol=1e-12, msg=lambda text, at=about: f"{at}: {text}")


def test_a_resumed_run_goes_on_with_the_same_noise_to_the_bit(tmp_path):
    train(epochs=1).save_checkpoint(tmp_path / "one.ckpt")
    rest = train(resume=tmp_path / "one.ckpt")
    assert rest.callbacks[-1].steps == [STEPS]
    assert_close(dict(weights(rest)), dict(weights(train())), rtol=0, atol=0)


def skipping(layout):
    """On a rank: steps that count in a run whose second step is skipped, and restarts."""
    callback, restart = GradientNoise(1e-6), OptimizerRestart(every=1)
    trainer = trainer_of(hybrid(**layout), callbacks=[callback, restart], plugins=[plugin()])
    trainer.fit(Poisoned(), small_loader(16, 4))
    assert isinstance(trainer.precision_plugin, FP16MasterWeights)
    return callback.steps, restart.restarts, trainer.precision_plugin.state.applied


def test_a_step_that_overflows_does_not_count():
    assert run_trainers(2, skipping, {"pipeline": 2}) == [([3], 2, 3)] * 2


def test_boxes_of_shards_are_what_tensors_have_here():
    assert all(run_ranks(4, placed))


def placed():
    """On a rank: whether boxes cut from the whole are what is here, even and uneven, and what has no box is refused."""
    mesh = dist.init_device_mesh("cpu", (2, 2))
    whole, found = torch.arange(7 * 5 * 2).view(7, 5, 2), []
    for placements in ([Shard(0), Replicate()], [Shard(1), Shard(0)], [Shard(0), Shard(0)], [Replicate(), Shard(2)]):
        tensor = distribute_tensor(whole, mesh, placements)
        found.append(torch.equal(shard_box(tensor).view(whole), tensor.to_local()))
    with pytest.raises(ValueError, match="only shards and replicas have a place"):
        shard_box(DTensor.from_local(whole, mesh, [Partial(), Replicate()]))
    with pytest.raises(ValueError, match=r"has sizes \[3, 5, 2\] here instead of \[2, 5, 2\]"):
        shard_box(DTensor.from_local(whole[:3], mesh, [Shard(0), Shard(0)], shape=(8, 5, 2), stride=whole.stride()))
    return all(found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eta": 0}, r"eta=0 must be a finite number above 0\."),
        ({"eta": float("nan")}, "eta=nan must be a finite number above 0"),
        ({"eta": True}, "eta=True must be a finite number"),
        ({"gamma": -0.1}, r"gamma=-0.1 must be a finite number of at least 0"),
        ({"gamma": "1"}, "gamma='1' must be a finite number"),
        ({"seed": 1.0}, "seed=1.0 must be a whole number of at least 0"),
        ({"seed": -1}, "seed=-1 must be a whole number of at least 0"),
    ],
)
def test_arguments_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GradientNoise(**options)


class Complex(Small):
    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.ones(2, dtype=torch.complex128))


class Sparse(Small):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(3, 2, sparse=True)


class Strange(Small):
    def configure_optimizers(self):
        return torch.optim.SGD([*self.parameters(), torch.zeros(7, requires_grad=True)], 0.1)


class Fused(Small):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, fused=True)


class Flattened(Small):
    def configure_model(self):
        self.inlet = FullyShardedDataParallel(self.inlet, device_id=torch.device("cpu"), use_orig_params=True)


def scaled():
    """Lightning's mixed precision with a scaler, on a CPU."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=16.0))


def refusal(model, *plugins):
    """What a fit says before it trains."""
    trainer = trainer_of(callbacks=[GradientNoise()], plugins=list(plugins))
    with pytest.raises(ValueError, match=r"\.$") as caught:
        trainer.fit(model(), small_loader(8, 4))
    assert trainer.global_step == 0
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_what_noise_cannot_be_added_to_is_refused_before_training():
    assert re.search(r"SGD holds a complex parameter of shape \[2\]: .* needs real ones", refusal(Complex))
    assert re.search("table has sparse=True, .* Set sparse=False", refusal(Sparse))
    assert re.search(r"a tensor of shape \[7\] that is not a parameter of the LightningModule", refusal(Strange))
    assert re.search("leaves gradients scaled .* Leave fused out", refusal(Fused, scaled()))
    (found,) = run_trainers(1, refusal, Flattened)
    assert re.search("flattened to shape .*: noise would not be .* strategy='hybrid_ptdp' with zero_stage=3", found)
    trainer = trainer_of()
    trainer.strategy.__class__ = DeepSpeedStrategy  # to make one, DeepSpeed must be there
    with pytest.raises(ValueError, match=r"cannot work under DeepSpeedStrategy.*strategy='hybrid_ptdp'"):
        GradientNoise().on_fit_start(trainer, Small())


class Scattered(Small):
    """A sparse gradient of the module's own."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(3, 2, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        return nn.functional.embedding(torch.tensor([1]), self.table, sparse=True).sum()


def test_a_sparse_gradient_is_refused_at_the_step():
    with pytest.raises(RuntimeError, match="table has a sparse gradient"):
        trainer_of(callbacks=[GradientNoise()]).fit(Scattered(), small_loader(8, 4))


def test_gradients_are_unscaled_before_they_get_noise():
    found = []
    for plugins in ([], [scaled()]):
        trainer_of(callbacks=[GradientNoise(ETA)], plugins=plugins).fit(module := Flat(), small_loader(8, 4))
        found.append(module.one.detach())
    assert torch.equal(*found)


class ByHand(Flat):
    """Two optimizers, the second of which steps in every other batch; with hooks or past them."""

    hooks = True

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers(use_pl_optimizer=self.hooks)[: 1 + batch_idx % 2]:
            optimizer.zero_grad()
            self.manual_backward((self.one + self.two).sum() * 0)
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD([parameter], lr=1.0) for parameter in (self.one, self.two)]


class PastHooks(ByHand):
    hooks = False


def test_manual_steps_count_for_their_optimizer_and_need_the_hooks(tmp_path):
    callback = GradientNoise(ETA, GAMMA, SEED)
    trainer = trainer_of(callbacks=[callback])
    trainer.fit(module := ByHand(), small_loader(16, 4))
    assert callback.steps == [4, 2]
    for name, parameter, steps in (("one", module.one, 4), ("two", module.two, 2)):
        noises = [noise_of(name, parameter, step) for step in range(steps)]
        assert_close(parameter.detach(), -sum(noises), rtol=0, atol=1e-12)
    with pytest.raises(RuntimeError, match=r"Optimizer 0 has stepped without Lightning's hooks.* self.optimizers\(\)"):
        trainer_of(callbacks=[GradientNoise()]).fit(PastHooks(), small_loader(8, 4))
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    checkpoint = torch.load(tmp_path / "two.ckpt", weights_only=True)
    callback.load_state_dict(checkpoint["callbacks"]["GradientNoise"])
    with pytest.raises(ValueError, match=r"has the steps of 2 optimizers for GradientNoise, and .* has returned 1"):
        callback.on_train_start(trainer_with(1), module)


def trainer_with(number):
    trainer = trainer_of()
    trainer.strategy.optimizers = [torch.optim.SGD([torch.zeros(1)], 0.1) for _ in range(number)]
    return trainer
