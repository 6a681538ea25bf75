"""Batches that are joined for one run of a schedule give the numbers of accumulating them, at every moment."""

from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from torch.testing import assert_close

from lightning_hybrid.callbacks.feeds import Recorder, Replay
from lightning_hybrid.callbacks.joined_batches import JoinedBatches, JoiningFeed
from lightning_hybrid.compat import around_advance
from lightning_hybrid.precision import FP16MasterWeights
from tests.launch import run_trainers
from tests.small import Small, fit, hybrid, loader, trainer_of, weights
from tests.test_resuming import Dropping

SAMPLES, BATCH = 30, 4  # eight batches, and the last is short
WINDOW = 6  # the second window has two batches


class Joining(Callback):
    """Joins batches, and keeps the micro-batches of each run and what the loop has counted."""

    def __init__(self, number):
        self.joined = JoinedBatches(number)
        self.runs, self.counts, self.indices = [], {}, []

    def on_fit_start(self, trainer, pl_module):
        around_advance(trainer, partial(self.joined.run, trainer))
        assembly = trainer.strategy.assembly
        assembly.engine.observers.append(lambda step, work: self.runs.append(list(step.sizes)) or work)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.indices.append(batch_idx)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        progress = trainer.fit_loop.epoch_loop.batch_progress
        self.counts[trainer.current_epoch, progress.current.processed] = progress.state_dict()


class Noisy(Small):
    block, depth = Dropping, 4

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss


class Weighted(Noisy):
    def training_step(self, batch, batch_idx):
        weight = batch[0][:, :1].abs() + 0.1
        loss = (weight * (self(batch[0]) - batch[1]).square()).sum() / weight.sum()
        return {"loss": loss, "loss_weight": weight.sum()}


def trained(number, make, data=1, module=Noisy, **options):
    """Weights and the mean loss of two epochs, with `number` batches in a run."""
    joining, own = Joining(number), options.pop("callbacks", [])
    options = {"accumulate_grad_batches": WINDOW, "use_distributed_sampler": False, "max_epochs": 2, **options}
    torch.manual_seed(1)  # where steps draw from the streams of the process
    trainer = fit(module(), loader(SAMPLES, BATCH, data), make(), callbacks=[joining, *own], **options)
    return joining, dict(weights(trainer)), {name: float(value) for name, value in trainer.callback_metrics.items()}


LAYOUTS = {  # ranks, replicas, strategy, micro-batches of the first run of three
    "pipeline": (2, 1, hybrid, [2] * 6),
    "interleaved": (2, 1, lambda: hybrid(chunks=2), [2] * 6),
    "gpipe with three": (2, 1, lambda: hybrid(microbatches=3, schedule="gpipe"), [2, 1, 1] * 3),
    "replicas of a pipeline": (4, 2, hybrid, [1] * 6),
    "zero 3": (2, 2, lambda: hybrid(1, zero_stage=3), [1] * 6),
    "one process": (1, 1, lambda: hybrid(1), [2] * 6),
    "one process, whole batches": (1, 1, lambda: hybrid(1, microbatches=1), [4] * 3),
}


def both(name):
    _, data, make, _ = LAYOUTS[name]
    (plain, expected, losses), (joining, found, joined_losses) = (trained(n, make, data) for n in (1, 3))
    return plain.counts, expected, losses, joining.runs, joining.indices, joining.counts, found, joined_losses


@pytest.mark.parametrize("name", LAYOUTS)
def test_joined_batches_are_accumulated_ones_in_fewer_runs(name):
    """Random numbers, a short batch and a short window too; the loop has counted the same at the same places."""
    ranks, *_, first = LAYOUTS[name]
    counts, expected, losses, runs, indices, joined_counts, found, joined_losses = run_trainers(ranks, both, name)[0]
    assert (len(runs), runs[0]) == (6, first)
    assert indices == [0, 3, 6] * 2
    assert joined_counts == {place: counts[place] for place in [(e, b) for e in range(2) for b in (3, 6, 8)]}
    assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert joined_losses == pytest.approx(losses, rel=1e-6)  # float32


def weighted(kind):
    options = {"module": Weighted, "max_epochs": 1}
    if kind == "masters":
        found = []
        for number in (1, 2):
            plugin = FP16MasterWeights(loss_scale=128.0)
            found.append(trained(number, hybrid, plugins=[plugin], **options | {"module": Half})[1])
        return found
    return [trained(number, hybrid, **options)[1] for number in (1, 2)]


class Half(Weighted):
    """Its data has the type of its weights."""

    def training_step(self, batch, batch_idx):
        dtype = self.inlet.weight.dtype
        return super().training_step([each.to(dtype) for each in batch], batch_idx)


@pytest.mark.parametrize("kind", ["weights", "masters"])
def test_returned_weights_and_scaled_losses_count_as_they_do_unjoined(kind):
    expected, found = run_trainers(2, weighted, kind)[0]
    assert_close(found, expected, rtol=1e-12, atol=1e-14)


class Validated(Noisy):
    def __init__(self):
        super().__init__()
        self.validated = []

    def validation_step(self, batch, batch_idx):
        self.validated.append((self.trainer.fit_loop.batch_idx, float(self.loss(batch))))


def validated(number, **options):
    module, joining = Validated(), Joining(number)
    options = {"callbacks": [joining], "max_epochs": 2, "num_sanity_val_steps": 0, **options}
    torch.manual_seed(1)
    fit(module, loader(32, 4), hybrid(1), val=loader(4, 4), accumulate_grad_batches=4, **options)
    return [len(sizes) // 2 for sizes in joining.runs], module.validated


def validated_both(options):
    return validated(1, **options), validated(4, **options)


@pytest.mark.parametrize(
    ("options", "runs"),
    [
        ({"val_check_interval": 3}, [3, 1, 2, 2] * 2),
        ({"val_check_interval": 5, "check_val_every_n_epoch": None}, [4, 1, 3, 2, 2, 3, 1]),  # counts over the epochs
        ({"limit_train_batches": 7}, [4, 3] * 2),
    ],
)
def test_a_run_ends_where_validation_is_due_and_where_an_epoch_ends(options, runs):
    (_, expected), (found, losses) = run_trainers(1, validated_both, options)[0]
    assert found == runs
    assert [place for place, _ in losses] == [place for place, _ in expected]
    assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in expected], rel=1e-12)


class Saving(Callback):
    """Saves in the second epoch, within a window."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        if (trainer.current_epoch, progress.processed) == (1, 2):
            trainer.save_checkpoint(self.path, weights_only=False)


def stopped(number, path, strategy, resume=False):
    others = [] if resume else [Saving(path)]
    trainer = trainer_of(strategy, callbacks=[Joining(number), *others], max_epochs=2, accumulate_grad_batches=4)
    trainer.fit(Noisy(), loader(SAMPLES, BATCH), ckpt_path=path if resume else None)
    return dict(weights(trainer))


def resumed(folder, first, second):
    path = folder / "middle.ckpt"
    return stopped(first, path, hybrid()), stopped(second, path, hybrid(), resume=True)


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2), (2, 4)])
def test_a_run_goes_on_within_a_window_however_many_are_joined(first, second, tmp_path):
    whole, found = run_trainers(2, resumed, tmp_path, first, second)[0]
    assert_close(found, whole, rtol=1e-12, atol=1e-14)


def item(number):
    return torch.full((2, 1), float(number)), number, 0


def test_a_feed_gives_what_is_left_at_its_end():
    feed = JoiningFeed(Replay([item(number) for number in range(3)]), 2)
    batch, *place = next(feed)
    assert (batch.flatten().tolist(), place, feed.sizes) == ([0, 0, 1, 1], [0, 0], (2, 2))
    batch, *place = next(feed)
    assert (batch.flatten().tolist(), place, feed.sizes) == ([2, 2], [2, 0], (2,))
    with pytest.raises(StopIteration):
        next(feed)


class Around(Callback):
    """Is around what joins, and runs the second of three runs from what it has kept."""

    def __init__(self):
        self.kept = []

    def on_train_start(self, trainer, pl_module):
        around_advance(trainer, self.run)

    def run(self, advance, fetcher):
        if len(self.kept) != 1:
            self.kept.append([])
            advance(Recorder(fetcher, self.kept[-1].append))
        else:
            self.kept.append([next(fetcher) for _ in range(3)])
            advance(Replay(self.kept[-1]))


def around():
    callback = Around()
    found = trained(3, lambda: hybrid(1), callbacks=[callback], max_epochs=1)[1]
    return [len(items) for items in callback.kept], found, trained(3, lambda: hybrid(1), max_epochs=1)[1]


def test_who_asks_later_has_the_batches_of_the_loader():
    kept, found, expected = run_trainers(1, around)[0]
    assert kept == [3, 3, 2]
    assert_close(found, expected, rtol=0, atol=0)


class Doubling(Small):
    """Makes two samples of each."""

    depth = 1

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [torch.cat([each, each]) for each in batch]


def test_hooks_that_change_how_many_samples_there_are_are_refused():
    with pytest.raises(RuntimeError, match="batches of 4, 4 samples, which were joined, and hooks have made 16"):
        run_trainers(1, doubled)


def doubled():
    fit(Doubling(), loader(8, 4), hybrid(1), callbacks=[Joining(2)], accumulate_grad_batches=2)
