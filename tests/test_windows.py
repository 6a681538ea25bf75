"""A run that stops within an accumulation window goes on with its gradients, under the same layout or any other."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader

from lightning_hybrid.parallel.checkpoint.parts import all_pieces
from lightning_hybrid.strategies.windows import ResumedWindow, kept_window
from tests.launch import run_trainers
from tests.small import WIDTH, Small, hybrid, samples, trainer_of, weights

ACCUMULATE, BATCH, BATCHES, LENGTH = 3, 8, 6, 4
STOP = 4  # the batch after which a checkpoint is saved: the second of the second window


class Mixing(nn.Module):
    """A block with a norm, whose gradient is a part on each rank of the tensor axis with sequence parallelism."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Windowed(Small):
    """Tied weights, one parameter that stays whole, one that no batch uses, and one that only some samples use."""

    block, depth, rate, weighted = Mixing, 4, 0.02, False

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False).double()
        self.head.weight = self.inlet.weight
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(3, 4, dtype=torch.float64))

    def forward(self, x):
        place = torch.arange(1, LENGTH + 1, dtype=x.dtype).view(1, -1, 1) / LENGTH
        x = self.inlet(x[:, None, :] * place)
        for block in self.blocks:
            x = block(x)
        return self.outlet(self.head(x).mean(1)) * self.scale

    def training_step(self, batch, batch_idx):
        x, y = batch
        if not self.weighted:
            return F.mse_loss(self(x), y)
        weight = x[:, :1].abs() + 0.1
        return {"loss": ((self(x) - y).square() * weight).sum() / weight.sum(), "loss_weight": weight.sum()}

    def configure_optimizers(self):
        tied, rest = [self.inlet.weight, self.scale], [self.inlet.weight, self.scale]
        others = [p for p in self.parameters() if all(p is not other for other in rest)]
        return torch.optim.AdamW([{"params": others, "weight_decay": 0.3}, {"params": tied}], self.rate, eps=1e-3)


class Weighted(Windowed):
    weighted = True


@dataclass(frozen=True)
class Spread:
    """A layout, and how it keeps gradients."""

    pipeline: int = 1
    tensor: int = 1
    zero_stage: int = 0
    chunks: int = 1
    replicate: int = 1
    on_host: bool = False
    offload: bool = False

    def strategy(self):
        tensor = {"tensor_parallel_size": self.tensor, "sequence_parallel": True} if self.tensor > 1 else {}
        return hybrid(
            self.pipeline,
            self.chunks,
            zero_stage=self.zero_stage,
            replicate_size=self.replicate,
            accumulate_on_cpu=self.on_host,
            cpu_offload=self.offload,
            **tensor,
        )

    def loader(self, first):
        """Batches of this rank's replica, from one on; the number of all of them, as Lightning counts on from there."""
        replica = self.pipeline * self.tensor
        data = dist.get_world_size() // replica
        place = dist.get_rank() // self.tensor % data
        x, y = samples(BATCH * BATCHES).tensors
        order = [*range(first, BATCHES), *range(first)]
        batches = [tuple(t[BATCH * i : BATCH * (i + 1)][place::data] for t in (x, y)) for i in order]
        return DataLoader(batches, batch_size=None)


LAYOUTS = {
    1: [Spread(), Spread(on_host=True), Spread(zero_stage=3, offload=True)],
    2: [
        *(Spread(zero_stage=stage) for stage in range(4)),
        *(Spread(pipeline=2, zero_stage=stage) for stage in (0, 2)),
        Spread(zero_stage=0, on_host=True),
        Spread(zero_stage=2, on_host=True),
        Spread(zero_stage=3, offload=True),
    ],
    4: [
        *(Spread(pipeline=2, chunks=2, zero_stage=stage) for stage in range(4)),
        *(Spread(tensor=2, zero_stage=stage) for stage in range(4)),
        *(Spread(replicate=2, zero_stage=stage) for stage in (1, 2, 3)),
        Spread(pipeline=2, tensor=2),
        Spread(pipeline=2, zero_stage=1, on_host=True),
    ],
}
ALL = [(size, index) for size, layouts in LAYOUTS.items() for index in range(len(layouts))]


class Keep(Callback):
    """Saves a checkpoint, and the window beside it, as whole tensors."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        assembly = trainer.strategy.assembly
        parts, numbers = kept_window(assembly.engine, assembly.runner.window)
        if (batch_idx + 1) % ACCUMULATE == 0:
            assert (parts, numbers) == ({}, {})
        if batch_idx == STOP:
            trainer.save_checkpoint(f"{self.path}.ckpt")
            tensors = gathered(parts)
            if dist.get_rank() == 0:
                torch.save({"tensors": tensors, "numbers": numbers}, f"{self.path}.window")


def gathered(parts):
    """Whole tensors of the parts of all ranks, every element of which some rank has."""
    mine = [(name, p.shape, p.dtype, piece.box, piece.data.clone()) for name, p, piece in all_pieces(parts)]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    whole, covered = {}, {}
    for name, shape, dtype, box, data in (piece for pieces in everyone for piece in pieces):
        tensor = whole.setdefault(name, torch.full(shape, float("nan"), dtype=dtype))
        known = box.view(covered.setdefault(name, torch.zeros(shape, dtype=torch.bool)))
        assert not known.any() or torch.equal(box.view(tensor), data), f"{name} differs between ranks"
        box.view(tensor).copy_(data)
        known.fill_(True)
    assert all(known.all() for known in covered.values())
    return whole


class Memory:
    """Reads from a dictionary of whole tensors."""

    def __init__(self, tensors):
        self.tensors, self.names = tensors, list(tensors)

    def read(self, parts):
        for name, part, piece in all_pieces(parts):
            assert part.shape == self.tensors[name].shape
            piece.data.copy_(piece.box.view(self.tensors[name]))


class Seed(Callback):
    """Hands a saved window over, as loading a checkpoint does."""

    def __init__(self, path):
        saved = torch.load(f"{path}.window", weights_only=True)
        self.resumed = ResumedWindow(Memory(saved["tensors"]), saved["numbers"])

    def on_train_start(self, trainer, pl_module):
        trainer.strategy.assembly.resumed = self.resumed


def run(model, spread, callbacks=(), path=None):
    options = {"accumulate_grad_batches": ACCUMULATE, "use_distributed_sampler": False}
    trainer = trainer_of(spread.strategy(), callbacks=list(callbacks), **options)
    trainer.fit(model(), spread.loader(0 if path is None else STOP + 1), ckpt_path=path)
    assert trainer.global_step == 2
    return dict(weights(trainer))


def saving(model, layouts, names, folder):
    return [
        (run(model, spread), run(model, spread, [Keep(folder / name)]))
        for spread, name in zip(layouts, names, strict=True)
    ]


def resuming(model, pairs, folder):
    return [run(model, spread, [Seed(folder / name)], f"{folder / name}.ckpt") for spread, name in pairs]


def name_of(size, index):
    return f"{size}-{index}"


def check(model, folder, chosen):
    """Each layout saves, and finishes what it saved, and what the ones before it have."""
    states, expected = {}, None
    sizes = sorted({size for size, _ in chosen})
    for size in sizes:
        own = [index for of, index in chosen if of == size]
        names = [name_of(size, index) for index in own]
        results = run_trainers(size, saving, model, [LAYOUTS[size][i] for i in own], names, folder, timeout=300)[0]
        for index, (alone, saved) in zip(own, results, strict=True):
            assert_close(saved, alone, rtol=0, atol=0, msg=lambda m, i=index, s=size: f"saving disturbs {s}-{i}: {m}")
            expected = expected or alone
            assert_close(alone, expected, rtol=1e-9, atol=1e-12)
            states[size, index] = alone
    for size in sizes:
        pairs = []
        for place, target in enumerate(chosen):
            sources = {target, chosen[place - 1], chosen[(3 * place + 1) % len(chosen)]}
            pairs += [(target, source) for source in sorted(sources) if target[0] == size]
        todo = [(LAYOUTS[size][index], name_of(*source)) for (_, index), source in pairs]
        found = run_trainers(size, resuming, model, todo, folder, timeout=300)[0]
        for (target, source), state in zip(pairs, found, strict=True):
            about = f"{LAYOUTS[size][target[1]]} from {LAYOUTS[source[0]][source[1]]}"
            exact = {"rtol": 0, "atol": 0} if target == source else {"rtol": 1e-9, "atol": 1e-12}
            assert_close(state, states[target], **exact, msg=lambda m, a=about: f"{a}: {m}")


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_a_window_goes_on_under_any_layout(tmp_path):
    check(Windowed, tmp_path, ALL)
