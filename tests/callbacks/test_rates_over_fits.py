"""Rates and restarts of fits that follow on others: with the same callbacks, after a failure, or with other ones."""

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Checkpoint, LearningRateFinder

from lightning_hybrid.callbacks import LearningRateScaling, LearningRateWarmup, OptimizerRestart
from tests.callbacks.rates import BATCH, Net, fitted
from tests.callbacks.test_learning_rate_warmup import Found, table
from tests.small import Small, fit, loader, trainer_of

QUARTERS = [0, 1 / 4, 2 / 4, 3 / 4, 1, 1]


class Evaluated(Net):
    def validation_step(self, batch, batch_idx):
        self.loss(batch)


def test_a_checkpoint_that_was_evaluated_is_not_gone_on_from(tmp_path):
    fitted(Net(), [LearningRateScaling(2 * BATCH), LearningRateWarmup(steps=4)], save=tmp_path)
    callbacks = [LearningRateScaling(2 * BATCH), LearningRateWarmup(steps=4)]
    trainer_of(callbacks=callbacks).validate(Evaluated(), loader(8, 4), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert fitted(Net(), callbacks)[0] == table([factor / 2 for factor in QUARTERS])


@pytest.mark.parametrize("order", [1, -1])
def test_a_warm_up_that_a_resumed_run_adds_begins_there(order, tmp_path):
    fitted(Net(), [LearningRateScaling(BATCH)], save=tmp_path)
    callbacks = [LearningRateScaling(BATCH), LearningRateWarmup(steps=4)]
    options = {"max_epochs": 2, "resume": tmp_path / "epoch=0.ckpt"}
    assert fitted(Net(), callbacks[::order], **options, save=tmp_path)[0] == table([*[1] * 6, *QUARTERS])[6:]
    again, _ = fitted(Net(), callbacks, max_epochs=3, resume=tmp_path / "epoch=1.ckpt")
    assert again == table([1] * 18)[12:]


def test_a_second_fit_begins_although_a_search_saves_before_it(tmp_path):
    search = LearningRateFinder(1e-6, 1e-3, num_training_steps=9, early_stop_threshold=None, update_attr=False)
    warmups = [LearningRateWarmup(steps=4), LearningRateWarmup(samples=4 * BATCH)]
    restart = OptimizerRestart(every=5, rewarm=2)
    for callbacks in ([], [search]):
        effective, _ = fitted(Found(), [*callbacks, *warmups, restart], default_root_dir=tmp_path)
        expected = [0.5 * factor**2 for factor in (0, 1 / 4, 2 / 4, 3 / 4, 1, 0)]
        assert [rate for (rate,) in effective] == pytest.approx(expected)
        assert restart.restarts == 1


class Failing(Net):
    """Fails in the fourth batch, before or after its backward pass."""

    def __init__(self, hook):
        super().__init__()
        self.hook = hook

    def fail(self, hook):
        if hook == self.hook and self.trainer.fit_loop.batch_idx == 3:
            raise ArithmeticError

    def training_step(self, batch, batch_idx):
        self.fail("training_step")
        return super().training_step(batch, batch_idx)

    def configure_gradient_clipping(self, *args, **kwargs):
        self.fail("clipping")


class SavingFailure(Checkpoint):
    """As `OnExceptionCheckpoint`, which warns in the next fit."""

    def __init__(self, path):
        self.path = path

    def on_exception(self, trainer, *args):
        trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("hook", ["training_step", "clipping"])
def test_samples_of_a_batch_that_failed_count_once(hook, tmp_path):
    callbacks = [LearningRateWarmup(samples=8 * BATCH), SavingFailure(tmp_path / "failed.ckpt")]
    with pytest.raises(ArithmeticError):
        fitted(Failing(hook), callbacks, enable_checkpointing=True)
    with pytest.warns(UserWarning, match="your dataloader is not resumable"):
        rest, _ = fitted(Net(), [LearningRateWarmup(samples=8 * BATCH)], resume=tmp_path / "failed.ckpt")
    assert rest == table([step / 8 for step in range(6)])[3:]


class Raw(Net):
    """Steps without Lightning's hooks."""

    automatic_optimization = False

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1.0)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        self.manual_backward(self.loss(batch) * 1e-3)
        optimizer.step()


def test_samples_of_steps_without_hooks_count():
    effective, _ = fitted(Raw(), [LearningRateWarmup(samples=4 * BATCH)])
    assert effective == [[factor] for factor in QUARTERS]


def test_warmups_of_one_number_in_two_units_are_two():
    effective, _ = fitted(Raw(), [LearningRateWarmup(steps=4), LearningRateWarmup(samples=4)])
    assert effective == [[0], [1 / 4], [2 / 4], [3 / 4], [1], [1]]


class Thawing(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.blocks)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks, optimizer)


class Thawed(Small):
    depth = 1

    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], self.rate)


class Centered(Small):
    def configure_optimizers(self):
        return torch.optim.RMSprop(self.parameters(), self.rate, centered=True)


def test_entries_that_cannot_be_cleared_alone_are_refused_before_training():
    module = Centered()
    with pytest.raises(ValueError, match="would be below zero when square_avg alone is cleared"):
        fit(module, loader(8, 4), callbacks=[OptimizerRestart(every=1, keys=["square_avg"])])
    assert module.trainer.global_step == 0
    fit(module, loader(8, 4), callbacks=[OptimizerRestart(every=1, keys=["square_avg", "grad_avg"])])
    assert all(parameter.isfinite().all() for parameter in module.parameters())


@pytest.mark.parametrize("keys", [None, ["step"]])
def test_groups_that_are_added_in_training_restart_too(keys):
    trainer = fit(Thawed(), loader(12, 4), callbacks=[Thawing(), OptimizerRestart(at=[5], keys=keys)], max_epochs=2)
    (optimizer,) = trainer.optimizers
    assert len(optimizer.param_groups) == 2
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}
    assert len(optimizer.state) == len(list(trainer.lightning_module.parameters()))
