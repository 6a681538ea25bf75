"""Stop, and go on in another layout: `python -m examples.checkpoints [FOLDER] [PROCESSES]` on the CPU, two by default.

Afterwards `lightning-hybrid checkpoint inspect checkpoints/last.ckpt` shows what is in the folder, and
`lightning-hybrid checkpoint export checkpoints/last.ckpt gpt.ckpt` makes one file of it.
"""

import sys
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils.data import DataLoader

from examples.gpt import GPT, Windows, library_files, read, split
from lightning_hybrid import HybridPTDPStrategy

STEPS, STOP = 8, 4  # of the whole run, and of its first half
BATCH = 16  # pieces a step, over all replicas


class Stop(Callback):
    """Ends a run in the middle of an epoch."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        trainer.should_stop = trainer.global_step == STOP


def train(strategy: str | Strategy, folder: Path, devices: int, batch_size: int, resume: str | None = None) -> Trainer:
    """Train a small GPT to the end, or until it is stopped if it is not resumed; there is no word of checkpoints in it.

    Args:
        strategy: Which processes have what.
        folder: Of the checkpoints.
        devices: Number of processes.
        batch_size: Pieces a step and replica.
        resume: What to go on from.
    """
    seed_everything(0, verbose=False)
    checkpoint = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1, save_last=True)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        callbacks=[checkpoint] if resume else [checkpoint, Stop()],
        max_steps=STEPS,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(Windows(read(split(library_files())[1]), 32), batch_size, shuffle=True)
    trainer.fit(GPT(width=32, depth=4, heads=2, context=32), data, data, ckpt_path=resume)
    bits = trainer.callback_metrics["train/bits_per_byte"]
    if trainer.is_global_zero:
        print(f"step {trainer.global_step}: {bits:.3f} bits per byte, {checkpoint.last_model_path}")
    return trainer


def main(folder: str = "checkpoints", devices: int = 2) -> Tensor:
    """Train over `devices` pipeline stages, which save in the background, and go on as `devices` replicas with ZeRO.

    Returns:
        The last step's bits per byte, up to rounding those of one process that was never stopped.
    """
    stages = HybridPTDPStrategy(
        pipeline_parallel_size=devices, num_microbatches=4, state_dict_type="sharded", async_save=True
    )
    train(stages, Path(folder), devices, BATCH)
    replicas = HybridPTDPStrategy(pipeline_parallel_size=1, zero_stage=3, state_dict_type="sharded")
    trainer = train(replicas, Path(folder), devices, BATCH // devices, resume="last")
    return trainer.callback_metrics["train/bits_per_byte"]


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
