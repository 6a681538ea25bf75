"""The newest complete checkpoint of a folder."""

import os

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_hybrid import latest_checkpoint
from lightning_hybrid.parallel.checkpoint.manifest import FILE
from tests.launch import run_trainers
from tests.small import Small, fit, hybrid, loader


def saved(folder):
    for kind in ("full", "sharded"):
        callback = ModelCheckpoint(folder, f"{kind}-{{step}}", every_n_train_steps=1, save_top_k=-1)
        fit(Small(), loader(8, 4), hybrid(1, state_dict_type=kind), callbacks=[callback], enable_checkpointing=True)


def set_time(path, seconds):
    os.utime(path, (seconds, seconds))


@pytest.mark.parametrize("newest", ["full-step=2.ckpt", "sharded-step=1.ckpt"])
def test_files_and_folders_count_by_when_they_were_completed(newest, tmp_path):
    assert latest_checkpoint(tmp_path / "none") is None
    run_trainers(1, saved, tmp_path)
    paths = sorted(tmp_path.glob("*.ckpt"))
    assert len(paths) == 4
    for path in paths:
        set_time(path / FILE if path.is_dir() else path, 1000)
    path = tmp_path / newest
    set_time(path / FILE if path.is_dir() else path, 2000)
    assert latest_checkpoint(tmp_path) == str(path)


def test_what_is_not_complete_does_not_count(tmp_path):
    complete = tmp_path / "complete.ckpt"
    torch.save({}, complete)
    set_time(complete, 1000)
    (tmp_path / "short.ckpt").write_bytes(complete.read_bytes()[:100])
    (tmp_path / ".partial.ckpt").write_bytes(complete.read_bytes())
    (tmp_path / "folder.ckpt" / "data-1").mkdir(parents=True)
    (tmp_path / "folder.ckpt" / FILE).write_text("{")
    (tmp_path / "another.txt").write_text("newer")
    assert latest_checkpoint(tmp_path) == str(complete)
