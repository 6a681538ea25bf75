import pytest
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_hybrid.strategies.signals import Signals
from tests.launch import run_trainers
from tests.small import Small, fit, hybrid, loader, trainer_of


class AskedToRequeue(Small):
    """Rank 1 gets SLURM's signal in the middle of batch 1."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.trainer.global_rank == 1:
            self.trainer._signal_connector._slurm_sigusr_handler_fn(10, None)
        return super().training_step(batch, batch_idx)


def steps_of_requeue():
    steps, connector = [], type(trainer_of(hybrid())._signal_connector)
    connector._slurm_sigusr_handler_fn = lambda self, *_: steps.append(self.trainer.global_step)
    trainer = fit(AskedToRequeue(), loader(16, 4), hybrid(2))
    return steps, trainer.global_step


def test_all_ranks_save_for_a_requeue_between_the_same_batches_and_go_on():
    for outcome in run_trainers(2, steps_of_requeue):
        assert outcome == ([2], 4)


def test_signal_while_predicting_ends_it_when_all_ranks_have_agreed():
    trainer, signals = trainer_of(), Signals()
    signals.install(trainer)
    trainer.state.stage = RunningStage.PREDICTING
    trainer._signal_connector._sigterm_notifier_fn(15, None)
    assert signals.wishes(trainer) == [0, 1, 0, 0]
    assert not trainer.received_sigterm  # not before all ranks have agreed
    with pytest.raises(SIGTERMException):
        signals.grant(trainer, [0.0, 1.0, 0.0, 0.0])
    assert trainer.received_sigterm


def test_signal_while_training_is_heeded_when_all_ranks_have_agreed():
    trainer, signals = trainer_of(), Signals()
    signals.install(trainer)
    trainer.state.stage = RunningStage.TRAINING
    signals.grant(trainer, [0.0, 1.0, 0.0, 0.0])
    assert trainer.received_sigterm
    assert not trainer.should_stop
