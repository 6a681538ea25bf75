"""`ModelCheckpoint` writes the same files, with the same decisions on every rank, as in one process."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.launch import run_trainers
from tests.small import Small, fit, hybrid, loader

VARIANTS = {
    "best two": {"monitor": "val_loss", "save_top_k": 2, "filename": "{epoch}-{val_loss:.4f}", "save_last": "link"},
    "worst": {"monitor": "val_loss", "mode": "max", "filename": "{step}-{val_loss:.4f}", "save_last": True},
    "steps": {"every_n_train_steps": 3, "save_top_k": -1, "filename": "{step}"},
    "weights": {"save_weights_only": True, "filename": "{epoch}"},
    "by the step": {"monitor": "loss", "every_n_train_steps": 2, "save_top_k": 1, "filename": "{step}-{loss:.4f}"},
    "by time": {"train_time_interval": timedelta(0), "filename": "{step}", "save_top_k": -1},
}


class Validated(Small):
    """Neither value is reduced over the ranks by the user."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


def checkpointed(layout, folder):
    """What each variant has decided, and what is in its folder."""
    pipeline, data, chunks = layout or (1, 1, 1)
    found = {}
    for name, options in VARIANTS.items():
        callback = ModelCheckpoint(folder / name, **options)
        strategy = hybrid(pipeline, chunks) if layout else "auto"
        train, val = loader(16, 4, data), loader(6, 4 // data, seed=1)
        trainer = fit(Validated(), train, strategy, val, callbacks=[callback], max_epochs=3, enable_checkpointing=True)
        trainer.strategy.barrier()
        paths = [callback.best_model_path, callback.last_model_path, *callback.best_k_models]
        links = sorted(path.name for path in (folder / name).iterdir() if path.is_symlink())
        files = sorted(os.listdir(folder / name))
        found[name] = ([Path(path).name for path in paths], callback.best_model_score, files, links)
    return found


@pytest.mark.parametrize("layout", [(2, 1, 1), (2, 2, 1)], ids=str)
def test_all_ranks_decide_alike_and_as_one_process(layout, tmp_path):
    """Case 28."""
    expected = checkpointed(None, tmp_path / "one")
    for found in run_trainers(layout[0] * layout[1], checkpointed, layout, tmp_path / "many"):
        for name, (names, score, files, links) in expected.items():
            assert found[name][0] == names, name
            torch.testing.assert_close(found[name][1], score)
            assert found[name][2:] == (files, links), name
    for path in (tmp_path / "many").rglob("*.ckpt"):
        assert set(torch.load(path, weights_only=False)["state_dict"]) == set(Validated().state_dict())
    assert expected["best two"][3] == ["last.ckpt"]
