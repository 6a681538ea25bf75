"""In the middle of an epoch: loaders of all kinds, streams to the bit, windows, and checkpoints of before."""

import random

import numpy
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from tests.launch import run_trainers
from tests.numbered import EPOCHS, Kind, Saving, fit
from tests.small import Small, hybrid, samples, trainer_of, weights
from tests.test_resuming import Dropping


def combined(folder, mode, workers, stop):
    def loader(start, number, batch):
        return DataLoader(range(start, start + number), batch, shuffle=True, num_workers=workers)

    parts = {"long": loader(0, 24, 4), "short": loader(100, 5, 2)}
    if mode != "mixed":
        train = CombinedLoader(parts, mode)
    else:
        train = CombinedLoader({**parts, "stream": DataLoader(Stream(), 4)}, "min_size")
    path = folder / f"{mode}-{workers}"
    if stop is None:
        return fit(train, saving=path)
    return fit(train, path=f"{path}-{stop}.ckpt")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(200, 224))


def all_combined(folder):
    found = {}
    for mode, workers in (("max_size_cycle", 0), ("max_size_cycle", 1), ("max_size", 0), ("min_size", 0)):
        seen, _ = combined(folder, mode, workers, None)
        for stop in range(1, len(seen) // EPOCHS):
            found[mode, workers, stop] = seen[stop:], *combined(folder, mode, workers, stop)
    return found


def test_several_loaders_go_on_together(tmp_path):
    """A short one may have ended, or begun anew, before."""
    for (mode, workers, stop), (expected, found, warned) in run_trainers(1, all_combined, tmp_path)[0].items():
        assert found == expected, (mode, workers, stop)
        assert not warned


def unresumable(folder):
    combined(folder, "mixed", 0, None)
    found = {"mixed": combined(folder, "mixed", 0, 1)[1]}
    for name, train in {
        "stream": lambda: DataLoader(Stream(), 4),
        "replacement": lambda: DataLoader(range(8), 2, sampler=RandomSampler(range(8), replacement=True)),
        "single": lambda: DataLoader(range(8), None),
        "batches": lambda: DataLoader(range(8), batch_sampler=OwnBatches(SequentialSampler(range(8)), 2, False)),
    }.items():
        fit(train(), saving=folder / name, limit_train_batches=4)
        seen, warned = fit(train(), path=folder / f"{name}-2.ckpt", limit_train_batches=4)
        found[name] = warned and [number for epoch, number, _ in seen if epoch == 0] == [2, 3]
    fit(Kind().loader(1), saving=folder / "grown")
    found["grown"] = fit(Kind(length=40).loader(1), path=folder / "grown-2.ckpt")[1]
    fit(Kind().loader(1), saving=folder / "changed")
    found["changed"] = fit(Kind(shuffle=True).loader(1), path=folder / "changed-2.ckpt")[1]
    return found


class OwnBatches(BatchSampler):
    """A batch sampler of the user's."""


def test_other_loaders_begin_the_epoch_anew_with_a_warning(tmp_path):
    """Case 32."""
    (found,) = run_trainers(1, unresumable, tmp_path)
    assert all(found.values()), found


class Drawing(Small):
    """Draws in blocks, in the step, in hooks and, in this process, in the dataset."""

    block, rate = Dropping, 1e-2

    def on_train_batch_start(self, batch, batch_idx):
        self.shift = random.random()

    def on_train_start(self):
        torch.rand(3), random.random(), numpy.random.rand()

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (self.shift + torch.rand((), dtype=torch.float64) + numpy.random.rand())


class Noisy(Dataset):
    """Adds noise from all streams."""

    def __init__(self, number):
        self.samples = samples(number)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        x, y = self.samples[index]
        return x + torch.randn_like(x) + random.random() + numpy.random.rand(), y


def noisy(layout, folder, workers, stop):
    seed_everything(3, workers=True, verbose=False)
    pipeline, data, chunks = layout
    train = DataLoader(samples(16) if workers else Noisy(16), 4 // data, shuffle=True, num_workers=workers)
    strategy = hybrid(pipeline, chunks, microbatches=1 if layout == (1, 1, 1) else 2)
    callbacks = [] if stop else [Saving(folder / f"{layout}-{workers}")]
    trainer = trainer_of(strategy, max_epochs=EPOCHS, callbacks=callbacks)
    trainer.fit(Drawing(), train, ckpt_path=folder / f"{layout}-{workers}-{stop}.ckpt" if stop else None)
    return weights(trainer), torch.rand(1).item(), random.random(), numpy.random.rand()


def all_noisy(layout, folder):
    found = []
    for workers in (0, 1):
        for stop in (None, 1, 3):
            found.append(noisy(layout, folder, workers, stop))
    path = folder / f"{layout}-0-1.ckpt"
    if dist.get_rank() == 0:
        entry = torch.load(path, weights_only=True)["lightning_hybrid"]
        assert len(entry["random"]) == dist.get_world_size()
    return found


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (2, 2, 1), (1, 2, 1)], ids=str)
def test_the_same_layout_goes_on_in_the_middle_of_an_epoch_to_the_bit(layout, tmp_path):
    """Case 18: dropout, noise and order; what the hooks of the start draw changes nothing."""
    for found in run_trainers(layout[0] * layout[1], all_noisy, layout, tmp_path):
        for start in (0, 3):
            whole, *resumed = found[start : start + 3]
            for state, *drawn in resumed:
                assert drawn == list(whole[1:])
                assert all(torch.equal(state[name], whole[0][name]) for name in whole[0])


def older(folder):
    """A checkpoint as it was before positions were kept; then one of nobody's."""
    fit(Kind(shuffle=True).loader(2), saving=folder / "old")
    found = {}
    for name, stop in (("old", 2), ("old", "end"), ("stock", 2)):
        path = folder / f"old-{stop}.ckpt"
        checkpoint = torch.load(path, weights_only=True)
        entry = checkpoint.pop("lightning_hybrid")
        if name == "old":
            streams = entry.pop("random")
            for place, replica in enumerate(entry["replicas"]):
                replica["random"] = streams[place]
                del replica["positions"], replica["accumulate"]
            checkpoint["lightning_hybrid"] = entry
        dist.barrier()
        if dist.get_rank() == 0:
            torch.save(checkpoint, folder / f"{name}-written.ckpt")
        dist.barrier()
        seen, warned = fit(Kind(shuffle=True).loader(2), path=folder / f"{name}-written.ckpt")
        found[name, stop] = [number for epoch, number, _ in seen], warned
    return found


def test_older_checkpoints_resume_as_they_did(tmp_path):
    for rank, found in enumerate(run_trainers(2, older, tmp_path)):
        assert found["old", 2] == found["stock", 2] == ([2, 3, 0, 1, 2, 3], rank == 0)
        assert found["old", "end"] == ([0, 1, 2, 3], False)


class Steps(Callback):
    """Counts the steps behind each batch."""

    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps.append((trainer.current_epoch, batch_idx, trainer.global_step))


def scheduled(folder, stop):
    """Windows of two batches, set by a callback; the data trained on are validated on too, from the same loader."""
    both, steps = DataLoader(range(48), 8), Steps()
    callbacks = [GradientAccumulationScheduler({0: 2}), steps]
    path = folder / f"scheduled-{stop}.ckpt" if stop else None
    saving, options = None if stop else folder / "scheduled", {"val": both, "val_check_interval": 3}
    return fit(both, path=path, saving=saving, callbacks=callbacks, **options)[0], steps.steps


def all_scheduled(folder):
    return [scheduled(folder, stop) for stop in (None, 1, 2, 3)]


def test_windows_of_a_scheduler_and_a_loader_for_two_purposes(tmp_path):
    ((seen, steps), *resumed) = run_trainers(1, all_scheduled, tmp_path)[0]
    assert [number for _, _, number in steps[:6]] == [0, 1, 1, 2, 2, 3]
    for stop, (found, again) in enumerate(resumed, start=1):
        assert found == seen[stop:]
        assert again == steps[stop:]
