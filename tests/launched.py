"""A script as a user would have it, for test_launchers.py: python -m tests.launched DEVICES NODES [FAILING RANK]."""

import json
import os
import sys

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import HybridPTDPStrategy


class Net(LightningModule):
    def __init__(self, failing_rank):
        super().__init__()
        self.failing_rank = failing_rank
        self.net = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.failing_rank == int(os.environ.get("LOCAL_RANK", 0)):
            raise ArithmeticError("the message of the rank that failed")
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        steps = int(self.trainer.estimated_stepping_batches)  # asks for the loaders, before the model is cut
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


if __name__ == "__main__":
    devices, nodes, *failing = map(int, sys.argv[1:])
    seed_everything(1, verbose=False)
    x = torch.randn(16, 4)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        num_nodes=nodes,
        strategy=HybridPTDPStrategy(pipeline_parallel_size=2),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(failing[0] if failing else -1), DataLoader(TensorDataset(x, x.sin()), 2))
    print(json.dumps({"rank": trainer.global_rank, "loss": float(trainer.callback_metrics["loss"])}), flush=True)
