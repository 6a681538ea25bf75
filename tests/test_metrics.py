"""What `self.log` shows: on every rank what one process shows, step by step and over epochs."""

import pytest
import torch

from tests.launch import run_trainers
from tests.small import LAYOUTS, Block, Small, Watch, assert_same, check_refused, fit, hybrid, loader

SAMPLES, BATCH, MICROBATCHES = 10, 4, 3  # batches of 4, 4 and 2 samples, cut into uneven micro-batches


class Logging(Small):
    """Everything that can be logged so that it does not matter how a batch is cut."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        errors = (out - y).square()
        self.log("loss", errors.mean(), on_step=True, on_epoch=True, prog_bar=True)
        self.log("by_default", errors.mean() / 2)
        self.log("epoch_only", errors.detach().mean(), on_step=False, on_epoch=True)
        self.log("sum", errors.sum(), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("largest", errors.max(), reduce_fx="max", on_step=True, on_epoch=True, prog_bar=True)
        self.log("smallest", out.min(), reduce_fx=torch.min, on_epoch=True)
        self.log("count", len(x), reduce_fx=torch.sum, on_epoch=True)
        self.log("constant", 0.5, on_epoch=True, sync_dist=True)
        weight = 1 + 3 * (x[:, :1] > 0)
        self.log("weighted", (weight * errors).sum() / weight.sum(), batch_size=weight.sum().item(), on_epoch=True)
        self.log("not_for_loggers", y.mean(), logger=False, prog_bar=True)
        self.log_dict({"abs": (out - y).abs().mean(), "out": out.mean()}, on_step=True, on_epoch=True)
        self.log("first_and_last", x.mean(), on_epoch=True)
        if batch_idx == 1:
            self.log("second_only", x.mean())
        if batch_idx == 2 and self.current_epoch == 1:
            self.log("late", x.square().mean(), on_epoch=True, prog_bar=True)
        return errors.mean()

    def validation_step(self, batch, batch_idx):
        errors = (self(batch[0]) - batch[1]).square()
        self.log("val_loss", errors.mean(), prog_bar=True)
        self.log("val_step", errors.mean(), on_step=True, on_epoch=True)
        self.log("val_sum", errors.sum(), reduce_fx="sum")
        self.log("val_largest", errors.max(), reduce_fx="max")
        self.log_dict(
            {"val_a": errors.mean() * 2, "val_b": self(batch[0]).mean()} if False else {"val_a": errors.mean()}
        )
        if batch_idx == 0:
            self.log("val_first", batch[0].mean())
        return errors.mean()


def watched(model, layout, **options):
    pipeline, data, chunks = layout
    strategy = hybrid(pipeline, chunks, MICROBATCHES) if pipeline else "auto"
    watch, train, val = Watch(), loader(SAMPLES, BATCH, data), loader(5, BATCH // data, seed=1)
    fit(model(), train, strategy, val, callbacks=[watch], **{"max_epochs": 2, "log_every_n_steps": 1, **options})
    return watch.seen


@pytest.fixture(scope="module")
def reference():
    return watched(Logging, (0, 1, 1))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_shows_what_one_process_shows(layout, reference):
    """Case 6: step by step, with an uneven last batch and uneven micro-batches."""
    assert len(reference[-1][1]) > 50
    for seen in run_trainers(layout[0] * layout[1], watched, Logging, layout):
        assert_same(seen, reference)


def test_accumulation_shows_the_same_on_every_rank():
    expected = watched(Logging, (0, 1, 1), accumulate_grad_batches=2)
    for seen in run_trainers(4, accumulated):
        assert_same(seen, expected)


def accumulated():
    return watched(Logging, (2, 2, 1), accumulate_grad_batches=2)


class LoggingBlock(Block):
    def forward(self, x):
        for owner in self.owner:
            owner.log(f"size_in_{self.number}", x.detach().square().mean(), on_step=True, on_epoch=True)
        return super().forward(x)


class LogsInBlocks(Small):
    """Blocks 0, 2 and 5, which are on other stages, log each under a name of its own."""

    block = LoggingBlock

    def __init__(self):
        super().__init__()
        for number, block in enumerate(self.blocks):
            block.number, block.owner = number, [self] if number in (0, 2, 5) else []

    def validation_step(self, batch, batch_idx):
        return self.loss(batch)


@pytest.mark.parametrize("layout", [(2, 1, 1), (2, 2, 1), (2, 1, 2)], ids=str)
def test_what_a_block_logs_is_shown_on_every_rank(layout):
    """Case 7: also where only the first stage, or only one in the middle, logs."""
    expected = watched(LogsInBlocks, (0, 1, 1))
    assert "callback_metrics size_in_0_epoch" in expected[-1][1]
    for seen in run_trainers(layout[0] * layout[1], watched, LogsInBlocks, layout):
        assert_same(seen, expected)


class SurprisingKeys(Small):
    """Which samples are in a micro-batch decides what it logs."""

    def training_step(self, batch, batch_idx):
        for sample in batch[0][:, 0].tolist():
            self.log(f"of_{sample:.3f}", sample, on_step=False, on_epoch=True)
        if self.inlet(batch[0]).mean() > 0:
            self.log("positive", batch[0].mean(), on_step=True, on_epoch=True)
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        if batch[0][0, 0] > 0:
            self.log("val_positive", batch[0][0, 0])
        return self.loss(batch)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_keys_that_some_microbatches_log_are_shown_on_every_rank(layout):
    """Case 7: nobody waits, and all ranks know the same keys."""
    first, *others = run_trainers(layout[0] * layout[1], watched, SurprisingKeys, layout, timeout=40)
    for seen in others:
        assert_same(seen, first)
    assert sum("of_" in name for name in first[-1][1]) >= SAMPLES
    values = {name.split("of_")[1]: value for name, value in first[-1][1].items() if "callback_metrics of_" in name}
    assert values == pytest.approx({sample: float(sample) for sample in values}, abs=1e-3)


class OwnReduction(Small):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("product", loss, on_epoch=True, reduce_fx=torch.prod)
        return loss


class LogsVector(Small):
    def training_step(self, batch, batch_idx):
        out = self(batch[0])
        self.log("vector", out.flatten())
        return out.mean()


class LogsAbsentValue(Small):
    """Block 0's output is on an earlier stage than the code that logs it."""

    def training_step(self, batch, batch_idx):
        x = kept = self.blocks[0](self.inlet(batch[0]))
        for block in self.blocks[1:]:
            x = block(x)
        self.log("early", kept.mean())
        return self.outlet(x).mean()


def test_log_that_cannot_be_combined_is_refused_on_every_rank():
    message = r"self.log\('product', reduce_fx=.*can be combined by 'mean', 'sum', 'max' or 'min' only"
    check_refused({OwnReduction: message})


def test_logged_vector_is_refused_on_every_rank():
    check_refused({LogsVector: r"vector.*(scalar|single element)"})


def test_logged_value_of_another_stage_is_refused_on_every_rank():
    check_refused(
        {LogsAbsentValue: "self.log.'early', .* reads a value of blocks.0, which lives on an earlier pipeline"}
    )


class Stops(Small):
    """Asks Lightning to stop, behind the last block."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if self.trainer.global_step == 1:
            self.trainer.should_stop = True
        return loss


def stopped(layout):
    strategy = hybrid(layout[0], layout[2]) if layout else "auto"
    return fit(Stops(), loader(40, 4, layout[1] if layout else 1), strategy, min_epochs=0, max_epochs=3).global_step


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
def test_stop_that_a_step_asks_for_is_everybodys(layout):
    assert run_trainers(layout[0] * layout[1], stopped, layout, timeout=30) == [stopped(None)] * layout[0] * layout[1]


class ReturnsMore(Small):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return {"loss": loss, "half": loss.detach() / 2, "nothing": None}

    def validation_step(self, batch, batch_idx):
        return self.loss(batch)


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
def test_outputs_of_steps_are_those_of_one_process(layout):
    expected = watched(ReturnsMore, (0, 1, 1))
    for seen in run_trainers(layout[0] * layout[1], watched, ReturnsMore, layout):
        assert_same(seen, expected)
