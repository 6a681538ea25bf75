"""Which rank sees which samples, and what ranks may do on their own while others wait."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from tests.launch import run_trainers
from tests.small import Small, fit, hybrid, loader, samples

NUMBER, BATCH = 22, 2


class Seen(Small):
    """Notes the numbers of the samples it is trained on."""

    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_train_epoch_start(self):
        self.epochs.append([])

    def on_train_batch_start(self, batch, batch_idx):
        self.epochs[-1] += batch[2].tolist()

    def loss(self, batch):
        return super().loss(batch[:2])


class Pairs(BatchSampler):
    """A batch sampler of the user's."""


def numbered():
    return TensorDataset(*samples(NUMBER).tensors, torch.arange(NUMBER))


def loaders():
    sampler = Pairs(RandomSampler(numbered()), BATCH, drop_last=True)
    return {
        "shuffled": (DataLoader(numbered(), BATCH, shuffle=True), {}),
        "in order": (DataLoader(numbered(), BATCH), {}),
        "limited": (DataLoader(numbered(), BATCH, shuffle=True), {"limit_train_batches": 3}),
        "batch sampler": (DataLoader(numbered(), batch_sampler=sampler), {}),
    }


def seen():
    found = {}
    for name, (train, limits) in loaders().items():
        module = Seen()
        trainer = fit(module, train, hybrid(), max_epochs=2, **limits)
        found[name] = module.epochs, len(trainer.train_dataloader), trainer.num_training_batches
    return found


def test_stages_share_samples_and_replicas_do_not():
    """Case 49: ranks 0 and 2 are one replica, 1 and 3 the other."""
    ranks = run_trainers(4, seen)
    for name in loaders():
        epochs, length, batches = zip(*(rank[name] for rank in ranks), strict=True)
        assert epochs[0] == epochs[2], name
        assert epochs[1] == epochs[3], name
        assert len(set(length)) == len(set(batches)) == 1
        for first, second in zip(epochs[0], epochs[1], strict=True):
            assert not set(first) & set(second), name
            assert len(first) == len(second) == batches[0] * BATCH - (name != "limited" and name != "batch sampler")
        assert epochs[0][0] != epochs[0][1], name  # Lightning shuffles the training share of each epoch anew
        everything = [number for rank in (0, 1) for number in epochs[rank][0]]
        assert len(everything) == len(set(everything))


class Together(Small):
    """Gathers at the end of an epoch, after progress bars have read the metrics on rank 0 alone."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        self.gathered = self.all_gather(torch.tensor(float(self.trainer.global_rank))).tolist()
        self.trainer.strategy.barrier()


class Reading(Callback):
    """Reads the metrics of an epoch on rank 0 alone."""

    def on_train_epoch_end(self, trainer, pl_module):
        self.read = float(trainer.callback_metrics["loss_epoch"]) if trainer.global_rank == 0 else None


def gathered():
    found = []
    for bar in (TQDMProgressBar(), RichProgressBar()):
        module, reading = Together(), Reading()
        fit(module, loader(8, 4, 2), hybrid(), max_epochs=2, callbacks=[bar, reading], enable_progress_bar=True)
        found.append((module.gathered, reading.read))
    return found


def test_ranks_may_read_metrics_alone_and_gather_afterwards():
    """Case 29."""
    for rank, outcomes in enumerate(run_trainers(4, gathered, timeout=90)):
        for places, read in outcomes:
            assert places == ([0, 1] if rank < 2 else [2, 3])
            assert (read is None) == (rank > 0)


def replicas(zero_stage):
    trainer = fit(Small(), loader(24, 4, 2), hybrid(zero_stage=zero_stage), accumulate_grad_batches=2)
    own = trainer.lightning_module.state_dict()
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in own.items()}


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_replicas_are_equal_to_the_bit(zero_stage):
    """Case 38."""
    states = run_trainers(4, replicas, zero_stage)
    for one, other in ((0, 1), (2, 3)):
        assert states[one].keys() == states[other].keys()
        assert all(torch.equal(states[one][name], states[other][name]) for name in states[one])
    assert states[0].keys() != states[2].keys()
