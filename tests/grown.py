"""A script as a user would have it, for test_elastic.py: `torchrun ... tests/grown.py FOLDER PLAN`."""

import json
import os
import sys
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_hybrid import HybridPTDPStrategy, latest_checkpoint
from lightning_hybrid.callbacks import BatchSizeGrowth
from lightning_hybrid.parallel.elastic import Meeting
from tests.small import Small, samples, weights

SAMPLES, BATCH, EPOCHS = 32, 2, 3
GROWTH = {"milestones": {6: 2, 12: 2}, "interval": "step"}  # 2, 4 and 8 samples a step


class Net(Small):
    depth = 1


class Seen(Callback):
    """Writes which samples a replica has in each step, and holds the run after a step until so many nodes wait."""

    def __init__(self, folder, holds):
        self.folder, self.holds = folder, holds

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        first = samples(SAMPLES).tensors[0]
        numbers = [int((first == x).all(1).nonzero()) for x in batch[0]]
        with open(self.folder / f"seen-{os.getpid()}", "a") as file:
            file.write(json.dumps([trainer.world_size, trainer.global_step, trainer.current_epoch, numbers]) + "\n")
        least = self.holds.get(f"{trainer.world_size} of {trainer.global_step}", 0)
        while len(Meeting(self.folder / "run").waiting()) < least:
            time.sleep(0.1)


def main(folder, holds, **options):
    torch.set_num_threads(1)
    run = folder / "run"
    growth = BatchSizeGrowth(**{**GROWTH, "max_accumulate": 1, "max_replicas": 4, "dirpath": run, **options})
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy=HybridPTDPStrategy(pipeline_parallel_size=1, state_dict_type="sharded"),
        max_epochs=EPOCHS,
        callbacks=[growth, ModelCheckpoint(run, every_n_train_steps=4, save_top_k=-1), Seen(folder, holds)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(samples(SAMPLES), BATCH, shuffle=True, generator=torch.Generator().manual_seed(1))
    trainer.fit(Net(), loader, ckpt_path=latest_checkpoint(run))
    state = weights(trainer)
    if trainer.is_global_zero:
        torch.save((trainer.world_size, trainer.global_step, dict(state)), folder / "weights.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
