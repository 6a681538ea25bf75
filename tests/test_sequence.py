"""Everything a user does with one Trainer, one after the other, on a module that has been cut long since."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torchmetrics import MeanMetric

from tests.launch import run_trainers
from tests.small import LAYOUTS, Small, hybrid, loader, trainer_of, weights


class Whole(Small):
    """Logs whatever it does; validation has two loaders. Called again, `configure_model` has nothing to do."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.mean = MeanMetric().set_dtype(torch.float64)

    def configure_model(self):
        self.calls.append(self.trainer.state.fn.value)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", self.loss(batch), add_dataloader_idx=dataloader_idx > 0)

    def test_step(self, batch, batch_idx):
        output = self(batch[0])
        self.log("test_loss", (output - batch[1]).square().mean())
        self.mean.update(output)
        self.log("mean", self.mean)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        decayed = [p for name, p in self.named_parameters() if "weight" in name]
        rest = [p for name, p in self.named_parameters() if "weight" not in name]
        return torch.optim.AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0}], 0.01)


def sequence(layout, folder):
    """Results of each call, and the weights at the end."""
    pipeline, data, chunks = layout or (1, 1, 1)
    strategy, share = hybrid(pipeline, chunks) if layout else "auto", 4 // data
    best = ModelCheckpoint(folder, "{epoch}-{val_loss:.4f}", monitor="val_loss", mode="max", save_last=True)
    trainer = trainer_of(strategy, max_epochs=2, callbacks=[best], enable_checkpointing=True)
    module, train, val = Whole(), loader(16, 4, data), [loader(6, 2 * share, seed=1), loader(3, 2 * share, seed=2)]
    results = [trainer.validate(module, val, verbose=False)]
    trainer.fit(module, train, val)
    results += [trainer.validate(module, val, verbose=False), _named(best.best_model_path, best.last_model_path)]
    results += [trainer.test(module, loader(5, share, seed=3), ckpt_path="best", verbose=False)]
    results += [trainer.predict(module, loader(7, share, seed=4))]
    trainer.save_checkpoint(folder / "middle.ckpt")
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, train, val)
    results += [_numbers(trainer), _named(best.best_model_path)]
    trainer.fit_loop.max_epochs = 5
    trainer.fit(module, train, val, ckpt_path="last")
    results += [_numbers(trainer), trainer.global_step, trainer.test(module, loader(5, share, seed=3), verbose=False)]
    return results, module.calls, weights(trainer)


def _numbers(trainer):
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def _named(*paths):
    return [path.rpartition("/")[2] for path in paths]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return sequence(None, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_one_trainer_does_everything_as_in_one_process(layout, expected, tmp_path):
    for rank, (results, calls, state) in enumerate(run_trainers(layout[0] * layout[1], sequence, layout, tmp_path)):
        assert calls == expected[1] == ["validate", "fit", "validate", "test", "predict", "fit", "fit", "test"]
        for found, right in zip(results, expected[0], strict=True):
            torch.testing.assert_close(found, right) if not _names(right) else _assert_equal(found, right)
        if rank == 0:
            torch.testing.assert_close(state, dict(expected[2]))


def _names(value):
    return isinstance(value, list) and value and isinstance(value[0], str)


def _assert_equal(found, right):
    assert found == right
