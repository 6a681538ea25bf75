"""`ModelCheckpoint` writes the same files, with the same decisions on every rank, as in one process."""

import os
import re
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_hybrid.parallel.checkpoint import manifest as folders
from lightning_hybrid.parallel.checkpoint.hollow import Hollow
from lightning_hybrid.parallel.checkpoint.reading import FolderReader
from tests.launch import run_trainers
from tests.small import Small, fit, hybrid, loader, trainer_of

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
        self.log("up", -float(self.global_step))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


# more names and removals than above, without links, which have to be complete at once
FOLDERS = {
    "one name": {"every_n_train_steps": 2, "save_top_k": -1, "filename": "{epoch}", "save_last": True},
    "named again": {"monitor": "up", "every_n_train_steps": 1, "filename": "{epoch}", "save_top_k": 1},
    "last by step": {"monitor": "val_loss", "filename": "{step}-{val_loss:.4f}", "save_last": True},
    "last only": {"save_top_k": 0, "every_n_train_steps": 1, "save_last": True},
}


class LastByStep(ModelCheckpoint):
    CHECKPOINT_NAME_LAST = "last-{step}"


def slow_down(owner, name):
    """Let training go on before a folder or a file is complete, or gone."""
    function = getattr(owner, name)

    def late(*args):
        time.sleep(0.03)
        function(*args)

    setattr(owner, name, late)


def checkpointed(layout, folder, variants=VARIANTS, options=None):
    """What each variant has decided, and what is in its folder."""
    pipeline, data, chunks = layout or (1, 1, 1)
    found, strategy_options = {}, options or {}
    if "async_save" in strategy_options:
        slow_down(folders, "commit")
        slow_down(folders, "remove")
        slow_down(Hollow, "close")
    for name, options in variants.items():
        callback = (LastByStep if name == "last by step" else ModelCheckpoint)(folder / name, **options)
        strategy = hybrid(pipeline, chunks, **strategy_options) if layout else "auto"
        train, val = loader(16, 4, data), loader(6, 4 // data, seed=1)
        trainer = fit(Validated(), train, strategy, val, callbacks=[callback], max_epochs=3, enable_checkpointing=True)
        trainer.strategy.barrier()
        paths = [callback.best_model_path, callback.last_model_path, *callback.best_k_models]
        links = sorted(path.name for path in (folder / name).iterdir() if path.is_symlink())
        files = sorted(os.listdir(folder / name))
        assert trainer.strategy.broadcast(files) == files  # nothing is written any more when fit is over
        found[name] = ([Path(path).name for path in paths], callback.best_model_score, files, links)
    return found


@pytest.mark.parametrize("layout", [pytest.param((2, 1, 1), marks=pytest.mark.full), (2, 2, 1)], ids=str)
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


def without_links(variants):
    """The same, but last.ckpt is a checkpoint of its own."""
    return {name: {**options, "save_last": bool(options.get("save_last"))} for name, options in variants.items()}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"state_dict_type": "sharded"}, marks=pytest.mark.full),
        {"state_dict_type": "sharded", "async_save": True},
        pytest.param({"async_save": True}, marks=pytest.mark.full),
    ],
    ids=["waits", "async", "files"],
)
def test_folders_have_the_names_that_files_would_have(options, tmp_path):
    """Case 28: also where names are looked up or are to be free while a checkpoint is still written or removed."""
    variants = {**(without_links(VARIANTS) if "async_save" in options else VARIANTS), **FOLDERS}
    expected = checkpointed(None, tmp_path / "one", variants)
    for found in run_trainers(2, checkpointed, (1, 2, 1), tmp_path / "many", variants, options):
        for name, (names, score, files, links) in expected.items():
            assert found[name][0] == names, name
            torch.testing.assert_close(found[name][1], score)
            assert found[name][2:] == (files, links), name
    for path in (path for path in (tmp_path / "many").rglob("*.ckpt") if path.is_dir()):
        reader = FolderReader(path)
        one = torch.load(tmp_path / "one" / path.relative_to(tmp_path / "many"), weights_only=False)
        assert {"model." + key for key in one["state_dict"]} <= set(reader.names)
        assert (reader.manifest.global_step, reader.manifest.epoch) == (one["global_step"], one["epoch"]), path
        assert set(reader.training()) - {"lightning_hybrid"} == set(one), path
        for key, value in one["state_dict"].items():
            torch.testing.assert_close(reader.whole("model." + key), value, rtol=1e-9, atol=1e-12)


class Adds(Validated):
    def __init__(self, callback):
        super().__init__()
        self.added = [callback]

    def configure_callbacks(self):
        return self.added


def links(folder):
    """What fit says of a link that the user or the module asks for, and whether it has trained."""
    callback, found = ModelCheckpoint(folder, save_last="link"), []
    for module, callbacks in [(Validated(), [callback]), (Adds(callback), [])]:
        strategy = hybrid(1, state_dict_type="sharded", async_save=True)
        trainer = trainer_of(strategy, callbacks=callbacks, enable_checkpointing=True)
        with pytest.raises(ValueError, match="link") as caught:
            trainer.fit(module, loader(8, 4), loader(8, 4))
        found.append((str(caught.value), trainer.global_step))
    return found


def test_links_to_what_is_still_written_are_refused(tmp_path):
    for found in run_trainers(2, links, tmp_path):
        for message, step in found:
            assert re.search(r"save_last='link'.*async_save=True.*Set save_last=True", message), message
            assert step == 0


def test_remote_folders_are_refused_before_training():
    module, strategy = Validated(), hybrid(1, state_dict_type="sharded")
    trainer = trainer_of(strategy, callbacks=[ModelCheckpoint("memory://folder")], enable_checkpointing=True)
    with pytest.raises(ValueError, match=r"got memory://folder. Give a path without a protocol"):
        trainer.fit(module, loader(8, 4), loader(8, 4))
    assert trainer.global_step == 0
