"""A run that four nodes come to, one after the other, all on this machine: `python -m examples.elastic [FOLDER]`.

Each node is `lightning-hybrid elastic` with one process, and all of them run this file as their script. A small network
learns scikit-learn's digits; its batch doubles twice, and the run leaves and starts again with the nodes that wait.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from examples.digits import parts
from lightning_hybrid import HybridPTDPStrategy, latest_checkpoint
from lightning_hybrid.callbacks import BatchSizeGrowth
from lightning_hybrid.parallel.elastic import Meeting

NODES, EPOCHS = 4, 6


class Net(LightningModule):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy."""
        images, classes = batch
        return F.cross_entropy(self.layers(images), classes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD, whose rate stays."""
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class ForTheShow(Callback):
    """Holds the run after its first epoch until the other nodes are there: it would end before they have started."""

    def __init__(self, folder: str) -> None:
        self.meeting = Meeting(folder)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for files of nodes that wait."""
        while trainer.current_epoch == 1 and len(self.meeting.waiting()) < NODES - 1:
            time.sleep(0.5)


def train(folder: str) -> None:
    """The script that each process runs, as often as it is started."""
    seed_everything(1, verbose=False)
    growth = BatchSizeGrowth([2, 4], max_accumulate=1, max_replicas=NODES, dirpath=folder)
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy=HybridPTDPStrategy(pipeline_parallel_size=1, state_dict_type="sharded"),
        max_epochs=EPOCHS,
        callbacks=[growth, ModelCheckpoint(folder, save_top_k=-1), ForTheShow(folder)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    images = parts()["train"]
    loader = DataLoader(TensorDataset(images.images, images.classes), 32, shuffle=True)
    trainer.fit(Net(), loader, ckpt_path=latest_checkpoint(folder))
    if trainer.is_global_zero:
        print(f"ended after {trainer.global_step} steps on {trainer.num_nodes} nodes", flush=True)


def start_nodes(folder: str) -> Sequence[int]:
    """One node begins, and the others come when the run is under way; returns their exit codes."""
    command = [sys.executable, "-W", "ignore", "-m", "lightning_hybrid.cli", "elastic"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    options = ["--dirpath", folder, "--nnodes", f"1:{NODES}", "--rdzv-endpoint", endpoint]
    timeouts = ["--rdzv-conf", "last_call_timeout=3"]
    script = ["-m", "examples.elastic", folder, "--train"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen([*command, *options, *timeouts, *script], env=environment)
    while not Path(folder, "elastic.json").exists() and first.poll() is None:
        time.sleep(0.5)
    late = [subprocess.Popen([*command, *options, *timeouts, *script], env=environment) for _ in range(NODES - 1)]
    return [node.wait() for node in (first, *late)]


def main(folder: str | None = None) -> int:
    """Run it; the exit status is that of a node that failed, if one did."""
    with tempfile.TemporaryDirectory() as other:
        return next(filter(None, start_nodes(folder or other)), 0)


if __name__ == "__main__":
    given = [each for each in sys.argv[1:] if each != "--train"]
    if "--train" in sys.argv:
        train(*given)
    else:
        sys.exit(main(*given))
