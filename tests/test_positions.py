"""In the middle of an epoch the data goes on at the next sample, in one order whatever the number of replicas."""

import itertools
import random
import re
import warnings
from typing import NamedTuple

import numpy
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from tests.launch import run_trainers
from tests.small import Small, hybrid, samples, trainer_of, weights
from tests.test_resuming import Dropping

SIZES = (1, 2, 4)
EPOCHS = 2


class Numbers(LightningModule):
    """Samples are numbers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1).double()

    def training_step(self, batch, batch_idx):
        parts = (
            [part for part in batch.values() if part is not None]
            if isinstance(batch, dict)
            else [torch.as_tensor(batch)]
        )
        return sum(self.linear(part.view(-1, 1).double()).square().mean() for part in parts) * 1e-9

    def validation_step(self, batch, batch_idx):
        self.linear(batch[:, None].double())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-9)


class Kind(NamedTuple):
    """Data of an epoch and what is done with them; `batch` counts the samples of all replicas."""

    length: int = 32
    batch: int = 8
    shuffle: bool = False
    drop_last: bool = False
    workers: int = 0
    seed: int | None = 5
    accumulate: int = 1
    own: bool = False

    def loader(self, size):
        generator = torch.Generator().manual_seed(8) if self.own else None
        return DataLoader(
            range(self.length),
            self.batch // size,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            num_workers=self.workers,
            generator=generator,
        )


KINDS = {
    "ordered": Kind(),
    "ordered-odd": Kind(length=29, workers=2),
    "shuffled": Kind(shuffle=True),
    "shuffled-odd": Kind(length=29, shuffle=True),
    "shuffled-dropping": Kind(length=27, shuffle=True, drop_last=True, seed=None),
    "shuffled-workers": Kind(shuffle=True, workers=2),
    "shuffled-own": Kind(shuffle=True, own=True),
    "windows": Kind(length=48, shuffle=True, accumulate=2),
}


class Seen(Callback):
    """What each rank is given; a module over stages is called on parts of it."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        parts = batch if isinstance(batch, dict) else {"": torch.as_tensor(batch)}
        lists = {name: part.tolist() for name, part in parts.items() if part is not None}
        self.seen.append((trainer.current_epoch, batch_idx, lists))


class Saving(Callback):
    """Saves after each batch of the first epoch, and at its end."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(f"{self.path}-{batch_idx + 1}.ckpt")

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(f"{self.path}-end.ckpt")


def fit(loader, seed=5, path=None, saving=None, pipeline=1, val=None, model=Numbers, callbacks=(), **options):
    """On a rank: what it was trained on, and the warnings of loaders that cannot go on."""
    seed_everything(seed, workers=True, verbose=False) if seed is not None else torch.manual_seed(7)
    strategy, seen = hybrid(pipeline, microbatches=1), Seen()
    callbacks = [*callbacks, seen, *([Saving(saving)] if saving else [])]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = trainer_of(strategy, max_epochs=EPOCHS, callbacks=callbacks, **options)
        trainer.fit(model(), loader, val, ckpt_path=path)
    return seen.seen, any("your dataloader is not resumable" in str(each.message) for each in caught)


def first_runs(folder):
    size = dist.get_world_size()
    return {
        name: fit(
            kind.loader(size), kind.seed, saving=folder / f"{name}-{size}", accumulate_grad_batches=kind.accumulate
        )
        for name, kind in KINDS.items()
    }


def resumed_runs(folder, pairs):
    size = dist.get_world_size()
    found = {}
    for name, saved, stop in pairs:
        kind, path = KINDS[name], folder / f"{name}-{saved}-{stop}.ckpt"
        found[name, saved, stop] = fit(kind.loader(size), kind.seed, path, accumulate_grad_batches=kind.accumulate)
    return found


def joined(ranks):
    """Per batch: epoch, number, and the samples of all replicas in the order from which they were dealt out."""
    batches = []
    for shares in zip(*ranks, strict=True):
        ((epoch, number),) = {share[:2] for share in shares}
        lists = [share[2][""] for share in shares]
        batches.append((epoch, number, [each for row in itertools.zip_longest(*lists) for each in row]))
    return batches


def trimmed(batches, kind):
    """Without the samples that stand in at the end of an epoch so that all replicas have equally many."""
    return [(epoch, number, batch[: kind.length - number * kind.batch]) for epoch, number, batch in batches]


STOPS = (1, 2, -1, "end")  # batches of the epoch, from its end if negative


def check(folder, chosen):
    """Run each kind under each data size, then under each from where each stopped, at the chosen of the stops."""
    whole, pairs = {}, {size: [] for size in SIZES}
    for size in SIZES:
        ranks = run_trainers(size, first_runs, folder)
        for name, kind in KINDS.items():
            whole[name, size] = trimmed(joined([rank[name][0] for rank in ranks]), kind)
    for size, (place, name), (other, saved) in itertools.product(SIZES, enumerate(KINDS), enumerate(SIZES)):
        number = len(whole[name, saved]) // EPOCHS
        stops = [number + stop if stop == -1 else stop for stop in STOPS]
        pairs[size] += [(name, saved, stops[which]) for which in chosen(place + other + SIZES.index(size))]
    for size in SIZES:
        ranks = run_trainers(size, resumed_runs, folder, pairs[size], timeout=300)
        for name, saved, stop in pairs[size]:
            expected, kind = whole[name, saved], KINDS[name]
            start = len(expected) // EPOCHS if stop == "end" else stop
            found = trimmed(joined([rank[name, saved, stop][0] for rank in ranks]), kind)
            assert found == expected[start:], (name, saved, stop, size)
            assert not any(rank[name, saved, stop][1] for rank in ranks), (name, saved, stop, size)


def test_every_data_size_goes_on_where_any_other_stopped(tmp_path):
    """Cases 18 and 32: at one of the stops for each kind and pair of sizes, in all following epochs too."""
    check(tmp_path, lambda number: [number % len(STOPS)])


@pytest.mark.full
def test_every_data_size_goes_on_from_every_stop(tmp_path):
    check(tmp_path, lambda number: range(len(STOPS)))


def rebatched(folder, batch, name, stop, accumulate=1):
    """Goes on with other batches; what was seen, or the error."""
    size = dist.get_world_size()
    kind = KINDS[name]._replace(batch=batch)
    try:
        return fit(kind.loader(size), kind.seed, f"{folder}/{name}-{stop}.ckpt", accumulate_grad_batches=accumulate)[0]
    except RuntimeError as error:
        return str(error)


def saved(folder, names):
    for name in names:
        kind = KINDS[name]
        fit(kind.loader(1), kind.seed, saving=folder / name, accumulate_grad_batches=kind.accumulate)


def test_other_batches_are_counted_anew_and_must_fit(tmp_path):
    run_trainers(1, saved, tmp_path, ["shuffled", "windows"])
    order = {name: [each for _, _, batch in whole(name) for each in batch] for name in ("shuffled", "windows")}
    for batch, stop, accumulate in ((4, 3, 1), (4, 3, 2), (16, 2, 1), (12, 3, 2)):
        ranks = run_trainers(2, rebatched, tmp_path, batch, "shuffled", stop, accumulate)
        found = joined(ranks)
        now = stop * 8 // batch
        assert [number for epoch, number, _ in found if epoch == 0] == list(range(now, -(-32 // batch)))
        samples = [each for epoch, _, batch in found for each in batch if epoch == 0]
        assert samples[: 32 - stop * 8] == order["shuffled"][stop * 8 : 32]
    refused = {
        (
            16,
            "shuffled",
            1,
            1,
        ): "after 8 samples of the epoch, in batches of 8 over all replicas, and now they are of 16",
        (4, "shuffled", 1, 4): "after what are now 2 batches of an epoch, which is not a multiple of",
        (4, "windows", 1, 2): "within an accumulation window of 2 batches. .* now 2 batches make up",
        (
            8,
            "windows",
            3,
            4,
        ): "after 3 batches, within an accumulation window of 2.*accumulate_grad_batches is 4",
    }
    for case, message in refused.items():
        for error in run_trainers(2, rebatched, tmp_path, *case):
            assert re.search(message, error), error


def whole(name):
    kind = KINDS[name]
    (seen,) = run_trainers(1, plainly, kind)
    return joined([seen])


def plainly(kind):
    return fit(kind.loader(1), kind.seed, accumulate_grad_batches=kind.accumulate)[0]


def short(folder, length, stop):
    kind = Kind(length=length, drop_last=True)
    if stop is None:
        return fit(kind.loader(dist.get_world_size()), saving=folder / "short")[0]
    try:
        return fit(kind.loader(1), path=folder / f"short-{stop}.ckpt")[0]
    except RuntimeError as error:
        return str(error)


def test_an_epoch_that_ends_before_the_place_is_refused(tmp_path):
    """Four replicas repeat two of 30 samples and make a fourth batch, which one process does not have."""
    run_trainers(4, short, tmp_path, 30, None)
    (error,) = run_trainers(1, short, tmp_path, 30, 3)
    assert "after 3 batches of an epoch that has 3 now: there is nothing left" in error
    (seen,) = run_trainers(1, short, tmp_path, 30, 2)
    assert len(seen) == 4


LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]  # pipeline, data


def over_stages(folder, pipeline, resume):
    """Fits with validation at the end of each epoch and in the middle; the model has blocks to cut between."""
    options = {"val_check_interval": 0.5, "pipeline": pipeline, "model": Staged}
    size = dist.get_world_size() // pipeline
    train, val = Kind(shuffle=True, batch=4).loader(size), DataLoader(range(4), 2)
    if not resume:
        return fit(train, saving=folder / f"{pipeline}x{size}", val=val, **options)[0]
    return {
        name: fit(Kind(shuffle=True, batch=4).loader(size), path=folder / f"{name}.ckpt", val=val, **options)
        for name in resume
    }


class Staged(Numbers):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1, 1).double() for _ in range(2))

    def training_step(self, batch, batch_idx):
        x = batch[:, None].double()
        for block in self.blocks:
            x = block(x)
        return super().training_step(batch, batch_idx) + x.mean()

    def validation_step(self, batch, batch_idx):
        x = batch[:, None].double()
        for block in self.blocks:
            x = block(x)
        self.log("loss", x.mean())


def replicas(ranks, layout):
    pipeline, data = layout
    for stage in range(1, pipeline):
        assert ranks[stage * data : (stage + 1) * data] == ranks[:data]
    return joined(ranks[:data])


def test_pipelines_and_validation_in_the_middle_of_an_epoch_change_nothing(tmp_path):
    whole = {}
    for pipeline, data in LAYOUTS:
        ranks = run_trainers(pipeline * data, over_stages, tmp_path, pipeline, None)
        whole[f"{pipeline}x{data}"] = replicas(ranks, (pipeline, data))
    names = [f"{name}-{stop}" for name, stop in zip(whole, (3, 5, 6, 1), strict=True)]
    for pipeline, data in LAYOUTS:
        ranks = run_trainers(pipeline * data, over_stages, tmp_path, pipeline, names)
        for name in names:
            layout, stop = name.split("-")
            found = replicas([rank[name][0] for rank in ranks], (pipeline, data))
            assert found == whole[layout][int(stop) :], (name, pipeline, data)
            assert not any(rank[name][1] for rank in ranks)


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


def chained(folder, name, path, saving):
    kind = KINDS[name]
    options = {"path": path and folder / path, "saving": folder / saving}
    return fit(kind.loader(dist.get_world_size()), kind.seed, **options)[0]


@pytest.mark.parametrize("name", ["ordered-odd", "shuffled"])
def test_a_run_may_stop_and_go_on_more_than_once(name, tmp_path):
    """What an epoch looks like is kept: Lightning would shuffle four replicas' share of data that are in order."""
    whole, path = None, None
    for stop, size in enumerate((1, 2, 4, 4)):
        ranks = run_trainers(size, chained, tmp_path, name, path, f"{stop}")
        found, path = trimmed(joined(ranks), KINDS[name]), f"{stop}-{stop + 1}.ckpt"
        whole = whole or found
        assert found == whole[stop:], size
    ranks = run_trainers(1, chained, tmp_path, name, "3-end.ckpt", "after")
    assert trimmed(joined(ranks), KINDS[name]) == whole[len(whole) // EPOCHS :]


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


def by_hand(folder, path):
    """The user shares the samples out, by a seed of its own."""
    size = dist.get_world_size()
    share = DistributedSampler(range(32), size, dist.get_rank(), seed=2)
    train, saving = DataLoader(range(32), 8 // size, sampler=share), None if path else folder / "own"
    return fit(train, path=path, saving=saving, use_distributed_sampler=False)


def test_samplers_that_share_out_by_hand_go_on(tmp_path):
    expected = joined([rank[0] for rank in run_trainers(2, by_hand, tmp_path, None)])
    for size in (1, 2):
        ranks = run_trainers(size, by_hand, tmp_path, tmp_path / "own-2.ckpt")
        assert joined([rank[0] for rank in ranks]) == expected[2:]
        assert not any(warned for _, warned in ranks)


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
