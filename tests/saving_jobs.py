"""Jobs that are struck while they save a folder, and go on from what is left."""

import os
import shutil
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler

from lightning_hybrid.parallel.checkpoint import manifest as folders
from lightning_hybrid.parallel.checkpoint import sharded, stream
from lightning_hybrid.parallel.checkpoint.hollow import Hollow
from lightning_hybrid.parallel.checkpoint.manifest import read_manifest
from lightning_hybrid.parallel.checkpoint.planner import PartsSavePlanner
from lightning_hybrid.parallel.checkpoint.reading import FolderReader
from lightning_hybrid.parallel.failures import watch
from lightning_hybrid.strategies import checkpoints
from tests.small import Small, hybrid, samples, trainer_of

BATCHES, EVERY, STEPS = 2, 2, 8  # saves at steps 2, 4, 6 and 8, each under its own name and as last.ckpt
NEW, OVER = 3, 4  # the save of step=4.ckpt, and of last.ckpt in place of that of step 2
POINTS = {  # where a rank is struck: an owner, one of its functions, and the call of it after the save has begun
    "begin": (folders, "begin", 1),
    "plan": (PartsSavePlanner, "create_local_plan", 1),
    "first tensor": (PartsSavePlanner, "resolve_data", 1),
    "amid tensors": (PartsSavePlanner, "resolve_data", 5),
    "before metadata": (sharded.Writer, "finish", 1),
    "before manifest": (folders, "commit", 1),
    "after manifest": (folders, "sync", 1),
    "after all is synced": (Path, "rename", 1),
    "moved in": (folders, "sync", 3),
    "manifest replaced": (Path, "rmdir", 1),
    "amid the old data": (Path, "unlink", 1),
    "before the old data goes": (shutil, "rmtree", 2),
    "tensors sent": (stream, "_deliver", 1),
    "amid the file": (Hollow, "fill", 5),
    "file not closed": (Hollow, "close", 1),
}
FILES = list(POINTS)[-3:]  # points of files; all others are of folders


class Strike:
    """Kills this process in a call of a function.

    Args:
        point: Which.
        save: In which save, from 1.
    """

    def __init__(self, point, save):
        self.owner, self.name, self.call = POINTS[point]
        self.save, self.saves, self.calls = save, 0, 0

    def install(self):
        self.before(checkpoints, "save_sharded", self.count)
        self.before(checkpoints, "stream_parts", self.count)
        self.before(self.owner, self.name, self.strike)

    def before(self, owner, name, action):
        function = getattr(owner, name)

        def call(*args, **kwargs):
            action()
            return function(*args, **kwargs)

        setattr(owner, name, call)

    def count(self):
        self.saves, self.calls = self.saves + 1, 0

    def strike(self):
        self.calls += 1
        if (self.saves, self.calls) == (self.save, self.call):
            os.kill(os.getpid(), signal.SIGKILL)


def run(folder, resume=None, pipeline=2, steps=STEPS, module=Small, callbacks=(), **options):
    """Train with a checkpoint every second step, and the last one besides; folders unless the options say files."""
    checkpoint = ModelCheckpoint(folder, "{step}", every_n_train_steps=EVERY, save_top_k=-1, save_last=True)
    size = int(os.environ.get("WORLD_SIZE", 1))
    data, rank = size // pipeline, int(os.environ.get("RANK", 0))
    share = DistributedSampler(samples(BATCHES * 4), data, rank % data, shuffle=False)
    strategy = hybrid(pipeline, **{"state_dict_type": "sharded", **options})
    trainer = trainer_of(
        strategy, max_steps=steps, max_epochs=-1, callbacks=[checkpoint, *callbacks], enable_checkpointing=True,
        devices=size,
    )  # fmt: skip
    trainer.fit(module(), DataLoader(samples(BATCHES * 4), 4 // data, sampler=share), ckpt_path=resume)
    return trainer


def struck_run(folder, rank, point, save, pipeline, options):
    watch.GRACE = 1.0
    if int(os.environ["RANK"]) == rank:
        Strike(point, save).install()
    run(folder, pipeline=pipeline, **options)
    time.sleep(5)  # the others learn of it in the meantime


def verify(path):
    """Read everything in a checkpoint; the steps it was saved at."""
    if path.is_file():
        return torch.load(path, weights_only=True)["global_step"]
    reader = FolderReader(path)
    for name in reader.names:
        reader.whole(name)
    assert reader.training()["global_step"] == read_manifest(path).global_step
    return reader.manifest.global_step


def go_on(folders_and_layouts):
    """Resume from the last checkpoint of each folder."""
    found = []
    for folder, pipeline, options in folders_and_layouts:
        at = {path.name: verify(path) for path in folder.glob("*.ckpt")}
        dist.barrier()
        trainer = run(folder, "last", pipeline, **options)
        found.append((at, dict(trainer.strategy.lightning_module_state_dict()), sorted(os.listdir(folder))))
    return found
