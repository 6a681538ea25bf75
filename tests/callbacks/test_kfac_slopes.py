"""Which slopes a K-FAC preconditioner sees, in what units, and what ranks with other layers hear of them."""

import re
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid.callbacks import KFACPreconditioner
from tests.launch import run_trainers
from tests.small import WIDTH, Small, fit, hybrid, samples, trainer_of


def preconditioner(**options):
    return KFACPreconditioner(**{"damping": 0.1, "factor_every": 1, "inverse_every": 1, "kl_clip": None, **options})


def batches(*groups):
    """A loader of batches with the given samples of six."""
    return DataLoader(samples(6), batch_sampler=[list(group) for group in groups])


class Attacked(Small):
    """Looks for gradients of its own before the loss that is trained on."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = x.clone().requires_grad_()
        torch.autograd.grad(F.mse_loss(self(x), y), x)
        (slope,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        return F.mse_loss(self(x.detach()), y) + 0.0 * slope.sum()


class Weighted(Small):
    def training_step(self, batch, batch_idx):
        return {"loss": self.loss(batch), "loss_weight": 3.0 * len(batch[0])}


def first_factors(loader, strategy="auto", module=Small, accumulate=1, **options):
    """A and G of the first layer behind the first step, on the rank that has it."""
    callback = preconditioner(**options)
    fit(
        module(),
        loader,
        strategy,
        callbacks=[callback],
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
    )
    factors = callback._factors.of.get("inlet")
    return factors and (factors.first, factors.second)


def test_a_sample_counts_once_in_short_and_uneven_windows():
    expected = first_factors(batches(range(6)))
    for groups, accumulate in (([range(6)], 3), ([range(4), [4, 5]], 2), ([[0], range(1, 6)], 4)):
        assert_close(first_factors(batches(*groups), accumulate=accumulate), expected, rtol=1e-12, atol=0)


def uneven():
    """On a rank: factors of the same six samples, which replicas share unevenly."""
    first = dist.get_rank() == 0
    own = batches([0], [1, 2, 3]) if first else batches([4], [5])
    by_pipeline = batches(range(3), [3], [4, 5])
    found = [
        first_factors(own, strategy, accumulate=3) for strategy in ("ddp", hybrid(1, microbatches=2, zero_stage=2))
    ]
    found.append(first_factors(own, hybrid(1, microbatches=1), Weighted, accumulate=4))
    found.append(first_factors(by_pipeline, hybrid(2), accumulate=4))
    found.append(first_factors(own, DDPStrategy(gradient_as_bucket_view=True), Attacked, accumulate=3))
    found.append(first_factors(own, hybrid(1, microbatches=2), Attacked, accumulate=3))
    return found


def test_a_sample_counts_once_where_replicas_have_batches_of_other_sizes():
    expected = first_factors(batches(range(6)))
    for found in run_trainers(2, uneven)[0]:
        assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("fisher", ["empirical", "mc"])
def test_gradients_that_a_step_asks_for_itself_are_no_slopes(fisher):
    found = first_factors(batches(range(6)), module=Attacked, fisher=fisher)
    assert_close(found[0], first_factors(batches(range(6)))[0], rtol=1e-12, atol=0)
    if fisher == "empirical":
        assert_close(found[1], first_factors(batches(range(6)))[1], rtol=1e-12, atol=0)
    else:
        assert float(found[1].trace()) > 0


class UnseenBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return F.linear(x, self.linear.weight)


def test_layers_whose_weights_are_used_without_a_call_are_named():
    class Around(Small):
        block = UnseenBlock

    with pytest.warns(UserWarning, match=r"has seen no call of blocks.0.linear, blocks.1.linear.* leave them out"):
        fit(Around(), batches(range(6)), callbacks=[preconditioner()])


class Long(Small):
    """Inputs so long that their squares are infinite; what later layers see is not."""

    depth = 2

    def forward(self, x):
        x = torch.tanh(self.inlet(x))
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


def long():
    """On a rank: how often each layer's means were taken in, in three steps of which the second has long inputs."""
    x, y = samples(6).tensors
    x = torch.where(torch.arange(6)[:, None] // 2 == 1, 1e200 * x, x)
    callback = preconditioner()
    trainer = fit(Long(), DataLoader(TensorDataset(x, y), 2), hybrid(2), callbacks=[callback])
    return {name: own.count for name, own in callback._factors.of.items()}, trainer.global_step


def test_means_of_all_stages_wait_where_those_of_one_are_not_finite():
    counts = run_trainers(2, long)
    assert set(counts[0][0]) | set(counts[1][0]) == {"inlet", "blocks.0.linear", "blocks.1.linear", "outlet"}
    for found, steps in counts:
        assert set(found.values()) == {2}
        assert steps == 3


class Later(Small):
    """Calls a layer from the second step on, and trains another one's bias in the first epoch alone."""

    def training_step(self, batch, batch_idx):
        x = self.inlet(batch[0])
        return F.mse_loss(self.outlet(x + self.blocks[0](x) if self.trainer.global_step else x), batch[1])

    def on_train_epoch_start(self):
        self.inlet.bias.requires_grad_(self.current_epoch == 0)


class Kept(KFACPreconditioner):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        names = ("inlet", "blocks.0.linear")
        found = {name: pl_module.get_parameter(f"{name}.weight").grad for name in names}
        before = {name: gradient.clone() for name, gradient in found.items() if gradient is not None}
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        changed = [name for name in before if not torch.equal(before[name], found[name])]
        self.changed = [*getattr(self, "changed", []), changed]


def test_layers_called_later_are_inverted_at_once_and_half_frozen_ones_left_alone():
    callback = Kept(0.1, factor_every=1, inverse_every=9)
    fit(Later(), batches([0, 1], [2, 3], [4, 5]), callbacks=[callback], max_epochs=2)
    assert callback.changed == [["inlet"], *2 * [["inlet", "blocks.0.linear"]], *3 * [["blocks.0.linear"]]]


class Negative(KFACPreconditioner):
    """The last stage's factors are negative."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if "outlet" in self._factors.of:
            self._factors.of["outlet"].second.fill_(-1e9)
            self._factors.of["outlet"].count = 1
        super().on_before_optimizer_step(trainer, pl_module, optimizer)


class Stuck(KFACPreconditioner):
    """The last stage's eigenvalues do not converge."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        effect = torch.linalg.LinAlgError if "outlet" in self._factors.of else torch.linalg.eigh
        with patch.object(torch.linalg, "eigh", side_effect=effect):
            super().on_before_optimizer_step(trainer, pl_module, optimizer)


def not_inverted():
    errors = []
    for callback in (Negative(0.1), Stuck(0.1, method="eigen")):
        with pytest.raises(RuntimeError, match=r"with damping=0\.1") as caught:
            fit(Small(), batches(range(6)), hybrid(2), callbacks=[callback])
        errors.append(str(caught.value))
    return errors


def mismatched(path):
    trainer = fit(Small(), batches(range(6)), hybrid(2), callbacks=[preconditioner()])
    trainer.save_checkpoint(path)
    if dist.get_rank() == 0:
        checkpoint = torch.load(path, weights_only=False)
        checkpoint["kfac_preconditioner"]["layers"]["outlet"]["second"] = torch.ones(2, 2)
        torch.save(checkpoint, path)
    dist.barrier()
    trainer = trainer_of(hybrid(2), callbacks=[preconditioner()], max_epochs=2)
    with pytest.raises(ValueError, match="Rank 1: ") as caught:
        trainer.fit(Small(), batches(range(6)), ckpt_path=path)
    return str(caught.value)


def test_a_fault_of_one_stage_is_an_error_on_all_ranks(tmp_path):
    for negative, stuck in run_trainers(2, not_inverted):
        assert negative.startswith("The Kronecker factors of outlet are not positive definite")
        assert re.match(r"The Kronecker factors of (outlet|blocks\.[0-9]\.linear) are not positive definite", stuck)
    for error in run_trainers(2, mismatched, tmp_path / "last.ckpt"):
        assert error.startswith("Rank 1: The checkpoint has Kronecker factors of shapes [(7, 7), (2, 2)] for outlet")
