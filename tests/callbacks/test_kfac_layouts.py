"""Natural gradients in every layout: the numbers of one process, also from checkpoints of others."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_hybrid.callbacks import ActivationRecompute, KFACPreconditioner
from tests.launch import run_trainers
from tests.optim.layouts import Row
from tests.small import Small, trainer_of, weights

WORDS, LENGTH, WIDTH = 7, 3, 6
BATCH, STEPS = 8, 6  # samples of a batch, of which each step has two


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH, bias=False)
        self.mix = nn.Conv2d(1, 1, 3, padding="same")

    def forward(self, x):
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return x + torch.tanh(self.mix(x[:, None]))[:, 0]


class Words(Small):
    """An embedding, convolutions and linear layers of sequences."""

    block, depth, weighted = Block, 2, False

    def __init__(self):
        super().__init__()
        self.inlet, self.outlet = nn.Embedding(WORDS, WIDTH).double(), nn.Linear(WIDTH, WORDS).double()

    def training_step(self, batch, batch_idx):
        tokens, labels = batch
        loss = F.cross_entropy(self(tokens).flatten(0, 1), labels.flatten())
        return {"loss": loss, "loss_weight": float(len(tokens))} if self.weighted else loss


class Weighted(Words):
    weighted = True


def loader(rank=0, replicas=1, number=2 * BATCH * STEPS):
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(WORDS, (number, LENGTH), generator=generator)
    data = TensorDataset(tokens, tokens.flip(1))
    share = DistributedSampler(data, replicas, rank, shuffle=False) if replicas > 1 else None
    return DataLoader(data, BATCH // replicas, sampler=share)


def preconditioner(**options):
    given = {"damping": {0: 0.1, 4: 0.05}, "factor_every": 2, "inverse_every": 3, "kl_clip": 1e-4, **options}
    return KFACPreconditioner(**given)


class Saving(Callback):
    """Saves behind a batch."""

    def __init__(self, path, batch):
        self.path, self.batch = path, batch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == self.batch:
            trainer.save_checkpoint(self.path)


def train(strategy="auto", replicas=1, rank=0, module=Words, resume=None, others=(), **options):
    """Weights, and what the last step was multiplied by."""
    kfac = preconditioner(**options.pop("kfac", {}))
    given = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, **options}
    trainer = trainer_of(strategy, callbacks=[kfac, *others], **given)
    trainer.fit(module(), loader(rank, replicas), ckpt_path=resume)
    return dict(weights(trainer)), kfac.clipping


ROWS = {
    "ddp": (2, None, {}),
    "data 2": (2, Row(data=2), {}),
    "zero 1": (2, Row(data=2, zero=1), {}),
    "zero 2": (2, Row(data=2, zero=2), {"kfac": {"method": "eigen"}}),
    "zero 3": (2, Row(data=2, zero=3), {}),
    "host": (2, Row(data=2, zero=2, cpu_offload=True), {}),
    "pipeline 2": (2, Row(pipeline=2), {"kfac": {"method": "eigen"}}),
    "weights": (2, Row(pipeline=2), {"module": Weighted}),
    "recompute": (2, Row(pipeline=2), {"recompute": True}),
    "data 4": (4, Row(data=4, zero=3, replicate=2), {}),
    "pipeline 2 x data 2": (4, Row(data=2, pipeline=2, zero=1), {}),
}


def by_row(names):
    found = []
    for name in names:
        _, row, options = ROWS[name]
        replicas = row.data if row else 2
        rank = dist.get_rank() % replicas
        options = dict(options)
        others = [ActivationRecompute()] if options.pop("recompute", False) else []
        found.append(train(row.strategy() if row else "ddp", replicas, rank, others=others, **options))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_every_layout_gives_the_numbers_of_one_process(size):
    names = [name for name, (ranks, *_) in ROWS.items() if ranks == size]
    expected = {method: train(kfac={"method": method}) for method in ("eigen", "inverse")}
    assert 0 < expected["eigen"][1] < 1  # steps were shortened
    for name, (found, clipping) in zip(names, run_trainers(size, by_row, names)[0], strict=True):
        method = ROWS[name][2].get("kfac", {}).get("method", "inverse")
        assert_close(found, expected[method][0], rtol=1e-9, atol=1e-12, msg=lambda text, at=name: f"{at}: {text}")
        assert clipping == pytest.approx(expected[method][1], rel=1e-9)


CHECKPOINTS = {"pipeline": (Row(pipeline=2), "full"), "zero": (Row(data=2, zero=3), "sharded")}
HALF = 4  # the batch behind which they are saved: the first of the third step, in which factors are new


def save_all(folder):
    for name, (row, form) in CHECKPOINTS.items():
        rank = dist.get_rank() % row.data
        train(row.strategy(state_dict_type=form), row.data, rank, others=[Saving(folder / name, HALF)])


def go_on(folder, tasks):
    found = []
    for name, row in tasks:
        rank = dist.get_rank() // row.tensor % row.data if dist.is_initialized() else 0
        found.append(train(row.strategy(), row.data, rank, resume=folder / name))
    return found


def test_checkpoints_of_one_layout_go_on_in_another_also_within_a_window(tmp_path):
    expected, clipping = train()
    run_trainers(2, save_all, tmp_path)
    tasks = [("pipeline", Row(data=2, zero=3)), ("zero", Row(pipeline=2)), ("zero", Row(data=2, zero=3))]
    for found, factor in run_trainers(2, go_on, tmp_path, tasks)[0]:
        assert_close(found, expected, rtol=1e-9, atol=1e-12)
        assert factor == pytest.approx(clipping, rel=1e-9)
