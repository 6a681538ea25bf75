"""A model of which no process ever has everything: `python -m examples.meta [PROCESSES]` on the CPU, two by default."""

import sys

import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from examples.gpt import GPT, Block, Windows, library_files, read, split
from lightning_hybrid import HybridPTDPStrategy


class LateGPT(GPT):
    """The GPT on the meta device: building it takes no memory, whatever its size."""

    def __init__(self, **sizes: int) -> None:
        with torch.device("meta"):
            super().__init__(**sizes)

    def _init_weights(self, module: nn.Module) -> None:
        """What the constructors did to the weights had no effect; the strategy calls this for each module."""
        stds = {self.embed: 0.5, self.position: 0.1, self.head: 0.005}
        if isinstance(module, Block):
            for layer in (module.out, module.shrink):
                nn.init.normal_(layer.weight, std=0.005)
        elif module in stds:
            nn.init.normal_(module.weight, std=stds[module])


def main(devices: int = 2, max_steps: int = 5) -> tuple[int, int, Tensor]:
    """Train with parameters sharded over `devices` replicas.

    Returns:
        Bytes of parameters that this process holds, those of the whole model, and the last step's bits per byte.
    """
    seed_everything(0, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=HybridPTDPStrategy(pipeline_parallel_size=1, zero_stage=3),
        max_steps=max_steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(Windows(read(split(library_files())[1]), 32), 16)
    model = LateGPT(width=32, depth=4, heads=2, context=32)
    trainer.fit(model, data, data)
    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    held, whole = sum(p.nbytes for p in local), sum(p.numel() * p.element_size() for p in model.parameters())
    print(f"process {trainer.global_rank} holds {held / 1024:.0f} of {whole / 1024:.0f} KiB")
    return held, whole, trainer.callback_metrics["train/bits_per_byte"]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
