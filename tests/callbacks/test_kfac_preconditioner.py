"""What a K-FAC preconditioner does in a fit: steps, schedules, skipped ones, labels of its own, and what it refuses."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, Subset

from lightning_hybrid.callbacks import DivergenceRollback, KFACPreconditioner, kfac_layers
from tests.callbacks.test_divergence_rollback import Scheduled, compared, data
from tests.launch import run_trainers
from tests.precision.halves import Half
from tests.precision.test_fp16 import Poisoned, alone, plugin
from tests.small import WIDTH, Small, fit, hybrid, loader, samples, trainer_of, weights


def preconditioner(**options):
    return KFACPreconditioner(**{"damping": 0.1, "factor_every": 2, "inverse_every": 2, "kl_clip": None, **options})


class Watched(KFACPreconditioner):
    """Keeps what it finds and leaves in gradients."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        before = {name: p.grad.clone() for name, p in pl_module.named_parameters()}
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        after = {name: p.grad.clone() for name, p in pl_module.named_parameters()}
        self.seen = [*getattr(self, "seen", ()), (before, after)]
        self.at = [*getattr(self, "at", ()), (dict(self._last), self._factors.of["inlet"].damping)]


class Normed(Small):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).double()

    def forward(self, x):
        return super().forward(self.norm(x))


def test_only_chosen_layers_change_and_steps_are_shortened_by_one_factor():
    callback = Watched(0.1, kl_clip=1e-6, modules=["blocks.*", "inlet"])
    plain = Watched(0.1, kl_clip=None, modules=["blocks.*", "inlet"])
    for each in (callback, plain):
        fit(Normed(), loader(4, 4), callbacks=[each])
    (before, after), (_, unclipped) = callback.seen[0], plain.seen[0]
    product = sum(float((before[n] * unclipped[n]).sum()) for n in before if n.startswith(("blocks", "inlet")))
    assert callback.clipping == pytest.approx((1e-6 / (Small.rate**2 * product)) ** 0.5, rel=1e-12)
    for name in before:
        chosen = name.startswith(("blocks", "inlet"))
        assert torch.equal(before[name], after[name]) != chosen
        if chosen:
            assert_close(after[name], unclipped[name] * callback.clipping, rtol=1e-12, atol=0)


def test_schedules_say_when_factors_and_inverses_are_new_and_with_what_damping():
    callback = Watched({0: 0.1, 4: 0.01}, factor_every={0: 1, 2: 3}, inverse_every=lambda step: 2 + (step > 3))
    fit(Small(), loader(36, 4), callbacks=[callback], max_epochs=1)
    factors, inverses = ([last[key] for last, _ in callback.at] for key in ("factors", "inverses"))
    assert factors == [0, 1, 1, 1, 4, 4, 4, 7, 7]
    assert inverses == [0, 0, 2, 2, 2, 5, 5, 5, 8]
    assert [damping for _, damping in callback.at] == [0.1] * 5 + [0.01] * 4


def test_factors_that_are_not_positive_definite_raise_damping_once():
    class Negative(KFACPreconditioner):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            if self._factors.of["inlet"].count:
                self._factors.of["inlet"].second.sub_(self.shift * torch.eye(WIDTH))
            super().on_before_optimizer_step(trainer, pl_module, optimizer)

    for method in ("eigen", "inverse"):
        callback = Negative(0.1, factor_every=99, inverse_every=1, method=method, factor_decay=0.0)
        callback.shift = 0.0
        fit(Small(), loader(8, 4), callbacks=[callback])
        factors = callback._factors.of["inlet"]
        mean = float(factors.second.diagonal().mean() / factors.first.diagonal().mean())
        least = float(torch.linalg.eigvalsh(factors.second)[0])
        callback.shift = least + (0.1 * mean) ** 0.5 * 2  # more than damping adds, and less than ten times as much
        with pytest.warns(UserWarning, match=r"of inlet are not positive definite with damping=0.1: 1 is used"):
            fit(Small(), loader(8, 4), callbacks=[callback])
        callback.shift = 50.0
        with pytest.raises(
            RuntimeError, match=r"inlet are not positive definite with damping=0\.1, and not with 1 either"
        ):
            fit(Small(), loader(8, 4), callbacks=[callback])


def test_a_run_goes_back_with_its_factors(tmp_path):
    found, options = [], {"accumulate_grad_batches": 2, "max_epochs": 2}
    for batches in (data(without=[6, 7]), data(poisoned=[7])):
        rollback = DivergenceRollback(snapshot_every=4, audit=str(tmp_path / "audit.csv"))
        torch.manual_seed(1)
        trainer = fit(Scheduled(), batches, callbacks=[preconditioner(factor_every=1), rollback], **options)
        found.append(weights(trainer))
    assert rollback.rollbacks == 2
    compared(found[1], found[0])


def halves(module):
    """On one rank: weights, types of factors, and steps at which they were new, in float16 with masters."""
    callback = preconditioner(factor_every=1)
    trainer = trainer_of(hybrid(1), plugins=[plugin()], callbacks=[callback], max_epochs=1)
    torch.manual_seed(1)
    trainer.fit(module(), loader(24, 4))
    used = [own for own in callback._factors.of.values() if own.count]
    types = {t.dtype for own in used for t in (own.first, own.inverses[1].values)}
    return dict(weights(trainer)), types, callback._factors.of["inlet"].count, trainer.global_step


def test_factors_are_wide_under_float16_and_skipped_steps_do_not_count():
    _, types, count, steps = alone(halves, Half)
    assert types == {torch.float32}
    assert count == steps
    _, _, count, skipped = alone(halves, Poisoned)
    assert skipped == steps - 1
    assert count == skipped


class Classes(Small):
    def training_step(self, batch, batch_idx):
        scores = self(batch[0]) * torch.tensor([-1.0, 0.5, 2.0])
        return F.cross_entropy(scores, batch[1].long().flatten() % 3)


def drawn(strategy="auto", replicas=1):
    """Weights; of the batches of one process, each replica has one after the other."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    indices = [i for i in range(32) if i // 4 % replicas == rank]
    callback = preconditioner(fisher="mc", factor_every=1, seed=3)
    trainer = trainer_of(
        strategy, callbacks=[callback], accumulate_grad_batches=2 // replicas, use_distributed_sampler=False
    )
    trainer.fit(Classes(), DataLoader(Subset(samples(32), indices), 4))
    return dict(weights(trainer))


def drawn_by_two():
    return [drawn("ddp", 2), drawn(hybrid(1, microbatches=2, zero_stage=0), 2)]


def test_labels_that_the_model_draws_are_the_same_with_replicas():
    expected, other = drawn(), preconditioner(fisher="empirical", factor_every=1)
    for found in run_trainers(2, drawn_by_two)[0]:
        assert_close(found, expected, rtol=1e-9, atol=1e-12)
    trainer = fit(Classes(), DataLoader(samples(32), 4), callbacks=[other], accumulate_grad_batches=2)
    assert not torch.allclose(weights(trainer)["inlet.weight"], expected["inlet.weight"])


class ByHand(Small):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Fetching(Small):
    def training_step(self, dataloader_iter):
        return self.loss(next(dataloader_iter)[0])


class Thawing(Small):
    backbone = property(lambda self: self.blocks)

    def configure_callbacks(self):
        return [BackboneFinetuning()]


class NoLoss(Small):
    def training_step(self, batch, batch_idx):
        return (self(batch[0]) - batch[1]).square().mean()


class Tied(Small):
    def __init__(self):
        super().__init__()
        self.blocks[1].linear.weight = self.blocks[0].linear.weight


class Newton(Small):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), 0.1)


class NoLayer(Small):
    def configure_optimizers(self):
        return torch.optim.SGD([self.outlet.bias], 0.1)


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Fetching, {}, "Fetching.training_step fetches its own batches by dataloader_iter"),
        (Thawing, {}, "BackboneFinetuning trains layers from later epochs on"),
        (Small, {"damping": lambda step: float(step < 1)}, "damping gives 0.0 for step 1, and must give a finite"),
        (Small, {"factor_every": lambda step: 1.5 if step else 1}, "factor_every gives 1.5 for step 1"),
        (ByHand, {}, "ByHand optimizes manually"),
        (NoLoss, {"fisher": "mc"}, "NoLoss.training_step calls none of torch's losses"),
        (Tied, {"modules": "*.linear"}, "blocks.0.linear cannot have Kronecker factors: it is tied to blocks.1"),
        (Newton, {}, "LBFGS runs backward passes many times a step"),
        (NoLayer, {}, "The model has no trained layer with Kronecker factors"),
        (Small, {"modules": ["inlet", "oulet"]}, "'oulet' matches no trained layer"),
    ],
)
def test_runs_that_cannot_have_factors_are_refused(module, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        fit(module(), loader(8, 4), callbacks=[KFACPreconditioner(**{"inverse_every": 1, **options})])


class Odd(Tied):
    """A layer of each kind that is left alone."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.lazy, self.lazy_patches = nn.LazyLinear(WIDTH), nn.LazyConv2d(1, 1)
        self.waves = nn.Linear(2, 2, dtype=torch.complex64)
        self.made = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
        self.half_trained, self.large = nn.Linear(2, 2), nn.Linear(2, 2**14 + 1, bias=False)

    def configure_optimizers(self):
        return torch.optim.SGD([p for name, p in self.named_parameters() if name != "half_trained.bias"], 0.1)


def test_layers_that_cannot_have_factors_are_left_alone_and_named(capfd):
    fit(Odd(), loader(8, 4), callbacks=[KFACPreconditioner()])
    shown = " ".join(re.sub("[│\\s]+", " ", capfd.readouterr().out).split())
    for name, reason in {
        "blocks.0.linear": "it is tied to blocks.1.linear.weight",
        "attention.out_proj": "nn.MultiheadAttention uses its weight without calling it",
        "lazy": "it has no sizes before its first call",
        "lazy_patches": "it has no sizes before its first call",
        "waves": "its weight is complex",
        "made": "its weight is made from other parameters",
        "half_trained": "its bias is not trained",
        "large": "16385 x 16385 is 1.1 GB in float32, and three of them; name it in modules to take it",
    }.items():
        assert f" {name} left alone {reason}" in shown
    assert " blocks.2.linear Linear 7 6 " in shown


def test_large_layers_are_taken_where_they_are_named(monkeypatch):
    monkeypatch.setattr(kfac_layers, "LARGEST", WIDTH)
    callback = preconditioner(modules="inlet")
    fit(Small(), loader(8, 4), callbacks=[callback])
    assert callback._factors.of["inlet"].count == 1
    with pytest.raises(ValueError, match="no trained layer with Kronecker factors"):
        fit(Small(), loader(8, 4), callbacks=[preconditioner()])


def split(pattern):
    """On a rank: the error, or nothing."""
    strategy = hybrid(1, tensor_parallel_size=2, tensor_parallel_plan={"*.linear": "colwise", "*.back": "rowwise"})
    try:
        fit(Wide(), loader(8, 4), strategy=strategy, callbacks=[KFACPreconditioner(modules=pattern)])
    except ValueError as error:
        return str(error)
    return ""


class WideBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.back = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

    def forward(self, x):
        return x + self.back(torch.tanh(self.linear(x)))


class Wide(Small):
    block = WideBlock


def test_layers_that_the_tensor_axis_splits_are_refused_by_name_and_others_are_taken():
    for pattern, message in ((None, "blocks.0.linear cannot have Kronecker factors: it is split over"), ("*let", "")):
        assert all(
            found.find(message) >= 0 and bool(found) == bool(message) for found in run_trainers(2, split, pattern)
        )


@pytest.mark.parametrize("name", ["damping", "factor_decay", "factor_every", "inverse_every", "kl_clip", "method"])
def test_wrong_arguments_are_refused(name):
    for value in (0, -1, "much", True, {3: 1}, float("nan"), lambda step: 0):
        if (name, value) != ("factor_decay", 0):
            with pytest.raises(ValueError, match=f"{name}(=| gives 0 for step 0)"):
                KFACPreconditioner(**{name: value})


def test_other_strategies_are_refused():
    trainer = trainer_of(ModelParallelStrategy())
    trainer.strategy.connect(Small())
    with pytest.raises(ValueError, match="cannot put gradients together under ModelParallelStrategy"):
        KFACPreconditioner().on_fit_start(trainer, trainer.strategy.lightning_module)
