"""Training goes on from a checkpoint as if it had never stopped, under the same or any other layout."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from tests.launch import run_trainers
from tests.small import LAYOUTS, Block, Small, Watch, assert_same, hybrid, loader, samples, trainer_of, weights
from tests.test_saving import Everything

MORE = [*LAYOUTS, (4, 1, 1)]


class Scheduled(Everything):
    """Logs, decays its learning rate at every step, and has two groups of parameters."""

    def __init__(self):
        super().__init__(groups=2)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("rate", self.trainer.optimizers[0].param_groups[1]["lr"])
        return loss

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def run(layout, folder, epochs, name=None, resume=None, model=Scheduled, **options):
    """Fits, from a checkpoint or from the start, and saves; what a callback saw, and the weights."""
    pipeline, data, chunks = layout
    strategy = hybrid(pipeline, chunks, microbatches=1)  # Everything counts the calls of its blocks
    watch, path = Watch(), folder / f"{resume}.ckpt" if resume else None
    trainer = trainer_of(strategy, max_epochs=epochs, callbacks=[watch], log_every_n_steps=1, **options)
    trainer.fit(model(), loader(20, 4, data), ckpt_path=path)
    if name:
        trainer.save_checkpoint(folder / f"{name}.ckpt")
    return watch.seen, weights(trainer)


def run_stock(folder, epochs, name=None, resume=None, model=Scheduled, **options):
    watch = Watch()
    trainer = trainer_of(max_epochs=epochs, callbacks=[watch], log_every_n_steps=1, **options)
    trainer.fit(model(), loader(20, 4), ckpt_path=folder / f"{resume}.ckpt" if resume else None)
    if name:
        trainer.save_checkpoint(folder / f"{name}.ckpt")
    return watch.seen, dict(weights(trainer))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with what a stock strategy saved after two epochs, what it sees after that, and the weights after four.

    The weights are those of a run without a stop; what is seen lacks the epoch values of the first two epochs.
    """
    folder = tmp_path_factory.mktemp("stock")
    run_stock(folder, 2, "stock")
    seen, expected = run_stock(folder, 4, None, "stock")
    uninterrupted, state = run_stock(folder, 4)
    assert [moment for moment, _ in seen] == [moment for moment, _ in uninterrupted[-len(seen) :]]
    torch.testing.assert_close(expected, state, rtol=0, atol=0)
    return folder, seen, expected


def all_layouts(layout, folder, first):
    """Each layout saves; each then goes on from what the first one and a stock strategy have saved."""
    run(layout, folder, 2, f"of-{layout}")
    return [run(layout, folder, 4, None, resume) for resume in (f"of-{layout}", f"of-{first}", "stock")]


@pytest.mark.full  # tests/test_checkpoints.py has such pairs
def test_any_layout_goes_on_from_any_other(whole):
    folder, seen, expected = whole
    first = MORE[1]
    order = [first, *(layout for layout in MORE if layout != first)]
    for layout in order:
        for rank, outcomes in enumerate(run_trainers(layout[0] * layout[1], all_layouts, layout, folder, first)):
            for resumed, state in outcomes:
                assert_same(resumed, seen)
                if rank == 0:
                    torch.testing.assert_close(state, expected)
    for layout in order:
        resumed, state = run_stock(folder, 4, None, f"of-{layout}")
        assert_same(resumed, seen)
        torch.testing.assert_close(state, expected)


class Dropping(Block):
    def forward(self, x):
        return torch.dropout(super().forward(x), 0.3, self.training)


class Random(Small):
    """Draws in blocks, in the step, and in hooks."""

    block, rate = Dropping, 1e-4

    def __init__(self):
        super().__init__()
        self.noise = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def on_train_batch_start(self, batch, batch_idx):
        self.shift = torch.rand(()).item()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch) + self.shift * self.noise.sum() + torch.rand((), dtype=torch.float64) * self.noise.sum()
        self.log("loss", loss)
        return loss

    def test_step(self, batch, batch_idx):
        self.loss(batch)


def drawn(layout, folder, seed, generator, resume, test=False):
    """Four epochs over shuffled data, with a checkpoint after each, or the last two of them."""
    seed_everything(seed, workers=True) if seed is not None else torch.manual_seed(torch.initial_seed() % 1000)
    pipeline, _, chunks = layout
    own = torch.Generator().manual_seed(5) if generator else None
    watch, train = Watch(), DataLoader(samples(12), 2, shuffle=True, generator=own)
    checkpoint = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    strategy = hybrid(pipeline, chunks, microbatches=1 if layout == (1, 1, 1) else 2)
    trainer = trainer_of(strategy, max_epochs=4, callbacks=[watch, checkpoint], enable_checkpointing=True)
    module = Random()
    if test:
        trainer.test(module, loader(4, 4, layout[1]), verbose=False)
    trainer.fit(module, train, ckpt_path=folder / "epoch=1.ckpt" if resume else None)
    return watch.seen, weights(trainer)


def test_what_was_done_before_resuming_changes_nothing(tmp_path):
    """The module is cut by a test first, which draws a seed of its own."""
    whole = run_trainers(2, drawn, (2, 1, 1), tmp_path, None, False, False)
    again = run_trainers(2, drawn, (2, 1, 1), tmp_path, None, False, True, True)
    assert again[0][0] == whole[0][0][-len(again[0][0]) :]
    torch.testing.assert_close(again[0][1], whole[0][1], rtol=0, atol=0)


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (2, 2, 1)], ids=str)
@pytest.mark.parametrize(("seed", "generator"), [(None, False), (3, False), (3, True)], ids=str)
def test_random_numbers_and_the_order_of_the_data_go_on(layout, seed, generator, tmp_path):
    size = layout[0] * layout[1]
    outcomes = run_trainers(size, drawn, layout, tmp_path, seed, generator, False)
    again = run_trainers(size, drawn, layout, tmp_path, seed, generator, True)
    for (seen, state), (found, resumed) in zip(outcomes, again, strict=True):
        batches, last = [[moment for moment, _ in each if "batch" in moment] for each in (seen, found)]
        assert len(last) == len(batches) // 2
        assert last == batches[len(last) :]
        assert all(value.isfinite().all() for value in state.values())
        torch.testing.assert_close(resumed, state, rtol=0, atol=0)


class Stateful:
    """Batches of one replica; knows where it is, and the sum of what it has given."""

    def __init__(self, batches):
        self.batches, self.position, self.given = list(batches), 0, 0.0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        while self.position < len(self.batches):
            batch = self.batches[self.position]
            self.position += 1
            self.given += batch[0].sum().item()
            yield batch
        self.position = 0

    def state_dict(self):
        return {"position": self.position, "given": self.given}

    def load_state_dict(self, state):
        self.position, self.given = state["position"], state["given"]


def interrupted(layout, folder, resume, steps=10, stateful=True):
    """Steps over twenty batches, two of them a step, or the rest of them after the third step."""
    pipeline, data, chunks = layout
    batches = list(loader(80, 4, data))
    train = Stateful(batches) if stateful else DataLoader(batches, None)
    checkpoint = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
    options = {"callbacks": [checkpoint], "enable_checkpointing": True, "accumulate_grad_batches": 2}
    trainer = trainer_of(hybrid(pipeline, chunks), **options, use_distributed_sampler=False)
    trainer.fit(Small(), train, ckpt_path=folder / f"step={steps}.ckpt" if resume else None)
    return getattr(train, "given", None), trainer.global_step, weights(trainer)


@pytest.mark.parametrize("layout", [(2, 2, 1), (1, 2, 1), (2, 1, 1), (1, 1, 1)], ids=str)
def test_stateful_loaders_go_on_in_the_middle_of_an_epoch(layout, tmp_path):
    """Case 32: each replica at its own place."""
    size = layout[0] * layout[1]
    whole = run_trainers(size, interrupted, layout, tmp_path, False)
    again = run_trainers(size, interrupted, layout, tmp_path, True, 3)
    for (given, step, state), (resumed_given, resumed_step, resumed) in zip(whole, again, strict=True):
        assert given == resumed_given
        assert step == resumed_step == 10
        torch.testing.assert_close(resumed, state, rtol=0, atol=0)
    assert layout[1] == 1 or whole[0][0] != whole[1][0]


def resumed_elsewhere(layout, folder):
    with pytest.raises(RuntimeError) as caught:
        interrupted(layout, folder, True, 3)
    return str(caught.value)


def test_loaders_in_the_middle_of_an_epoch_do_not_fit_another_number_of_replicas(tmp_path):
    run_trainers(2, interrupted, (1, 2, 1), tmp_path, False)
    (message,) = run_trainers(1, resumed_elsewhere, (1, 1, 1), tmp_path)
    assert "stateful loaders of 2 replica(s), and now there are 1" in message
    assert "Resume with a data parallel size of 2" in message


def plainly(folder):
    interrupted((1, 2, 1), folder, False, stateful=False)
    if dist.get_rank() > 0:
        interrupted((1, 2, 1), folder, True, 3, stateful=False)
        return
    with pytest.warns(UserWarning, match="ended before the epoch ended and your dataloader is not resumable"):
        interrupted((1, 2, 1), folder, True, 3, stateful=False)


def test_plain_loaders_start_the_epoch_anew_with_a_warning(tmp_path):
    """Case 32."""
    run_trainers(2, plainly, tmp_path)
