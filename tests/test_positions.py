"""In the middle of an epoch the data goes on at the next sample, in one order whatever the number of replicas."""

import itertools
import re

import pytest
import torch.distributed as dist
from torch import nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
)

from tests.launch import run_trainers
from tests.numbered import EPOCHS, KINDS, SIZES, Kind, Numbers, fit, joined, trimmed


def first_runs(folder, names):
    size, found = dist.get_world_size(), {}
    for name in names:
        kind, saving = KINDS[name], folder / f"{name}-{size}"
        found[name] = fit(kind.loader(size), kind.seed, saving=saving, accumulate_grad_batches=kind.accumulate)
    return found


def resumed_runs(folder, pairs):
    size = dist.get_world_size()
    found = {}
    for name, saved, stop in pairs:
        kind, path = KINDS[name], folder / f"{name}-{saved}-{stop}.ckpt"
        found[name, saved, stop] = fit(kind.loader(size), kind.seed, path, accumulate_grad_batches=kind.accumulate)
    return found


STOPS = (1, 2, -1, "end")  # batches of the epoch, from its end if negative


def check(folder, names, chosen):
    """Run each kind under each data size, then under each from where each stopped, at the chosen of the stops."""
    whole, pairs = {}, {size: [] for size in SIZES}
    for size in SIZES:
        ranks = run_trainers(size, first_runs, folder, names)
        for name in names:
            whole[name, size] = trimmed(joined([rank[name][0] for rank in ranks]), KINDS[name])
    for size, (place, name), (other, saved) in itertools.product(SIZES, enumerate(names), enumerate(SIZES)):
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
    """Cases 18 and 32: at one of the stops for each other kind and pair of sizes, in all following epochs too."""
    check(tmp_path, list(KINDS)[2::2], lambda number: [number % len(STOPS)])


@pytest.mark.full
def test_every_data_size_goes_on_from_every_stop(tmp_path):
    check(tmp_path, list(KINDS), lambda number: range(len(STOPS)))


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
