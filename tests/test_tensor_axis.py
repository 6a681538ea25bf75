"""Trainings with a tensor axis have the numbers of one process, whatever made the slices: steps, norms, states."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanMetric

from lightning_hybrid.parallel.gradients import local
from tests.launch import run_trainers
from tests.small import Watch, assert_same, check_refused, fit, hybrid, loader, samples, trainer_of, weights
from tests.split_by_hand import SmallMlps, split_by_hand

LAYOUTS = [(1, 2, 1, 1), (2, 2, 1, 1), (1, 2, 2, 1), (2, 2, 1, 2)]  # pipeline, tensor, data, chunks


class Logging(SmallMlps):
    """Logs with every reduction, by hooks and metrics too, and draws random numbers in its steps."""

    def __init__(self):
        super().__init__()
        self.mean = MeanMetric().set_dtype(torch.float64)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        self.log("samples", float(len(batch[0])), reduce_fx="sum")
        self.mean.update(loss, len(batch[0]))
        return {"loss": loss, "loss_weight": len(batch[0])}

    def on_train_epoch_end(self):
        self.log("epoch", float(self.current_epoch), reduce_fx="max")
        self.log("mean", self.mean.compute())
        self.mean.reset()

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


def share(number, batch_size, data=1, seed=0):
    """As `loader`, where neighbours on the tensor axis get the same."""
    dataset = samples(number, seed)
    rank = 0
    if data > 1:
        rank = dist.get_rank() // 2 % data
    return DataLoader(dataset, batch_size // data, sampler=DistributedSampler(dataset, data, rank, shuffle=False))


OPTIONS = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.05}


def trained(pipeline, data, chunks, zero):
    """On a rank: everything that a user sees of a fit, a validation, predictions and a second fit."""
    watch = Watch()
    with split_by_hand():
        strategy = hybrid(pipeline, chunks, tensor_parallel_size=2, zero_stage=zero)
        trainer = trainer_of(strategy, **OPTIONS, callbacks=[watch])
        module = Logging()
        trainer.fit(module, share(16, 4, data), share(6, 2, data))
        first = {name: value.clone() for name, value in weights(trainer).items()}
        predictions = trainer.predict(module, share(6, 2, data))
        trainer.fit_loop.max_epochs = 4
        trainer.fit(module, share(16, 4, data), share(6, 2, data))
        second = weights(trainer)
        counted = sum(local(parameter).numel() for parameter in strategy.assembly.engine.counted_parameters())
    moments = [(moment.split(",")[0], values) for moment, values in watch.seen]
    return moments, first, torch.cat(predictions), second, counted


@cache
def reference():
    watch, module = Watch(), Logging()
    trainer = trainer_of("auto", **OPTIONS, callbacks=[watch])
    trainer.fit(module, loader(16, 4), loader(6, 2))
    first = {name: value.clone() for name, value in weights(trainer).items()}
    predictions = trainer.predict(module, loader(6, 2))
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, loader(16, 4), loader(6, 2))
    return (
        [(moment.split(",")[0], values) for moment, values in watch.seen],
        first,
        torch.cat(predictions),
        weights(trainer),
    )


@pytest.mark.parametrize(("layout", "zero"), [*((layout, 0) for layout in LAYOUTS), ((1, 2, 2, 1), 1)], ids=str)
def test_a_fit_is_that_of_one_process(layout, zero):
    pipeline, tensor, data, chunks = layout
    results = run_trainers(pipeline * tensor * data, trained, pipeline, data, chunks, zero)
    seen, first, predictions, second = reference()
    for rank, result in enumerate(results):
        assert_same(result[0], seen, rel=1e-7)  # torchmetrics adds in float32
        torch.testing.assert_close(result[2], predictions)
        assert bool(result[1]) == (rank == 0)
    torch.testing.assert_close(results[0][1], dict(first), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(results[0][3], dict(second), rtol=1e-9, atol=1e-12)
    assert sum(result[4] for result in results) == sum(p.numel() for p in SmallMlps().parameters())


def saved(folder, pipeline, tensor, before=None):
    """On a rank: train from a checkpoint, or from the start, and save."""
    epochs = 1 if before is None else 2
    with split_by_hand():
        strategy = hybrid(pipeline, tensor_parallel_size=tensor) if dist.is_initialized() else "auto"
        trainer = trainer_of(strategy, max_epochs=epochs, accumulate_grad_batches=2)
        module = Logging()
        path = folder / f"{before}.ckpt" if before else None
        trainer.fit(module, share(16, 4), share(6, 2), ckpt_path=path)
        trainer.save_checkpoint(folder / f"{pipeline}-{tensor}-{epochs}.ckpt")


def states(path):
    checkpoint = torch.load(path, weights_only=False)
    return checkpoint["state_dict"], checkpoint["optimizer_states"]


@pytest.mark.parametrize(
    ("first", "then"), [((1, 2), (1, 1)), ((1, 1), (2, 2)), ((1, 2), (1, 4)), ((2, 2), (1, 2))], ids=str
)
def test_a_checkpoint_is_that_of_one_process_and_any_layout_goes_on_from_it(tmp_path, first, then):
    run_trainers(first[0] * first[1], saved, tmp_path, *first)
    run_trainers(then[0] * then[1], saved, tmp_path, *then, f"{first[0]}-{first[1]}-1")
    alone = tmp_path / "alone"
    alone.mkdir()
    saved(alone, 1, 1)
    saved(alone, 1, 1, "1-1-1")
    for found, epoch in ((first, 1), (then, 2)):
        mine, expected = states(tmp_path / f"{found[0]}-{found[1]}-{epoch}.ckpt"), states(alone / f"1-1-{epoch}.ckpt")
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-12)
        module = Logging.load_from_checkpoint(tmp_path / f"{found[0]}-{found[1]}-{epoch}.ckpt")
        torch.testing.assert_close(dict(module.state_dict()), dict(expected[0]), rtol=1e-9, atol=1e-12)


class ByHand(SmallMlps):
    """Accumulates over two backward passes, clips, and steps."""

    clip = 0.05

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for part in (1.0, 3.0):
            self.manual_backward(part * self.loss(batch))
        self.clip_gradients(optimizer, self.clip, "norm")
        optimizer.step()


class PastTheStrategy(ByHand):
    def training_step(self, batch, batch_idx):
        self.loss(batch).backward()
        self.optimizers().step()


def by_hand(data, zero=0):
    with split_by_hand():
        trainer = fit(ByHand(), share(16, 4, data), hybrid(1, 1, 1, tensor_parallel_size=2, zero_stage=zero))
        result = weights(trainer)
        with pytest.raises(RuntimeError, match=r"never was: loss\.backward\(\) leaves each"):
            fit(PastTheStrategy(), share(16, 4, data), hybrid(1, 1, 1, tensor_parallel_size=2, zero_stage=zero))
    return result


@pytest.mark.parametrize("data", [1, 2])
def test_manual_optimization_is_that_of_one_process(data):
    found = run_trainers(2 * data, by_hand, data)[0]
    expected = weights(fit(ByHand(), loader(16, 4)))
    torch.testing.assert_close(found, dict(expected), rtol=1e-9, atol=1e-12)


class Drawing(SmallMlps):
    """Notes what it sees and draws."""

    def __init__(self):
        super().__init__()
        self.seen = ["none"]

    def training_step(self, batch, batch_idx):
        self.seen.append((batch[0].sum().item(), torch.rand(1).item()))
        return self.loss(batch)


def drawn(data):
    torch.manual_seed(100 + dist.get_rank())  # nobody has agreed on a seed
    with split_by_hand():
        module = Drawing()
        fit(module, DataLoader(samples(16), 4 // data, shuffle=True), hybrid(1, 1, 1, tensor_parallel_size=2))
    return module.seen


def test_ranks_of_a_tensor_group_see_the_same_samples_and_draw_alike_without_a_seed():
    pair = run_trainers(2, drawn, 1)
    assert pair[0] == pair[1]
    results = run_trainers(4, drawn, 2)
    assert results[0] == results[1]
    assert results[2] == results[3]
    assert not set(results[0][1:]) & set(results[2][1:])


def other_batch(pipeline):
    mine = samples(8, seed=dist.get_rank() % 2)
    with split_by_hand(), pytest.raises(RuntimeError) as caught:
        fit(SmallMlps(), DataLoader(mine, 4), hybrid(pipeline, tensor_parallel_size=2))
    return str(caught.value)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_other_batches_on_the_tensor_axis_are_an_error_on_every_rank(pipeline):
    for message in run_trainers(2 * pipeline, other_batch, pipeline):
        assert f"The ranks {list(range(2 * pipeline))} of one model replica were given different batches" in message


class Compiled(SmallMlps):
    def __init__(self):
        super().__init__()
        self.blocks[1].up.compile(backend="eager")


class Wrapped(SmallMlps):
    def __init__(self):
        super().__init__()
        self.blocks[1].up = torch.compile(self.blocks[1].up, backend="eager")


class AdafactorOnSlices(SmallMlps):
    def configure_optimizers(self):
        return torch.optim.Adafactor(self.parameters())


class MuonOnSlices(SmallMlps):
    def configure_optimizers(self):
        return torch.optim.Muon([p for p in self.parameters() if p.ndim == 2])


REFUSED = {
    Compiled: "blocks.1.up is compiled and tensor_parallel_size=2 shows it slices of its matrices",
    Wrapped: "blocks.1.up is compiled and .* Do not compile it",
    AdafactorOnSlices: "torch.optim.Adafactor looks at whole parameters",
    MuonOnSlices: "torch.optim.Muon looks at whole parameters",
}


@pytest.mark.filterwarnings("ignore:tensor_parallel_size=2 splits nothing")  # no rule covers these by-hand models
def test_what_cannot_work_on_slices_is_refused_before_training():
    with_slices = {"pipeline": 1, "tensor_parallel_size": 2}
    check_refused(REFUSED, **with_slices)
