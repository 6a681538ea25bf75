"""What a step communicates and keeps: `python -m examples.ledgers [PROCESSES]` on the CPU, two by default."""

import sys

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from examples.gpt import GPT, Windows, library_files, read, split
from lightning_hybrid import HybridPTDPStrategy
from lightning_hybrid.callbacks import CommunicationLedger, MemoryLedger


def main(devices: int = 2, max_steps: int = 5, picture: str = "memory.png") -> tuple[CommunicationLedger, MemoryLedger]:
    """Train a small GPT over `devices` pipeline stages for a few steps; draw the memory of the first one's third."""
    communication, memory = CommunicationLedger(), MemoryLedger(depth=1, picture=picture)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=HybridPTDPStrategy(pipeline_parallel_size=devices, num_microbatches=4),
        callbacks=[communication, memory],
        max_steps=max_steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(Windows(read(split(library_files())[1]), 32), 16)
    trainer.fit(GPT(width=32, depth=4, heads=2, context=32), data, data)
    return communication, memory


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
