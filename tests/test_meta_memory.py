"""A rank never holds more of a model that is built on the meta device than its share and one part."""

import gc
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook

from lightning_hybrid.compat import storage_key
from lightning_hybrid.parallel.engine import Engine
from lightning_hybrid.parallel.meta.initialising import Initialiser
from tests.launch import run_trainers
from tests.small import WIDTH as FEATURES
from tests.small import Small, fit, hybrid, loader

WIDTH, DEPTH = 64, 8
MATRIX = WIDTH * WIDTH * 8  # bytes; whatever else a small batch needs is smaller than the half of one
PLAN = {"blocks.*.first": "colwise", "blocks.*.second": "rowwise"}
PART, MODEL = 2 * MATRIX, 2 * MATRIX * DEPTH


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(x)))


class Large(Small):
    """Nothing but blocks matters."""

    block, depth = Block, DEPTH

    def __init__(self):
        with torch.device("meta"):
            super().__init__()
            self.inlet, self.outlet = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 1)
        self.double()

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.rate)


class Most:
    """Bytes of matrices in memory at once until it is settled who keeps what: after parts, and calls of modules."""

    def __init__(self):
        self.most, self.parts = 0, []

    def look(self, *_):
        storages = {}
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor) and not issubclass(type(thing), DTensor) and not thing.is_meta:
                storages[storage_key(thing)] = thing.untyped_storage().nbytes()
        self.most = max(self.most, sum(size for size in storages.values() if size >= MATRIX / 2))

    @contextmanager
    def looking(self):
        make, settle = Initialiser.make, Engine.settle

        def made(initialiser, part, *args):
            result = make(initialiser, part, *args)
            self.parts.append(part)
            self.look()
            return result

        def settled(engine):
            first = engine.ownership is None
            result = settle(engine)
            if first:
                self.look()
                hook.remove()
            return result

        hook = register_module_forward_hook(self.look)
        with patch.object(Initialiser, "make", made), patch.object(Engine, "settle", settled):
            yield self


def kept(layout, data):
    gc.collect()
    gc.freeze()
    train, val = loader(8, 4, data), loader(2, 2)
    with Most().looking() as most:
        fit(Large(), train, hybrid(**{"microbatches": 1, **layout}), val, num_sanity_val_steps=1)
    return most.most, most.parts


@pytest.mark.parametrize(
    ("layout", "data", "share"),
    [
        ({"pipeline": 1, "zero_stage": 3}, 2, MODEL / 2),
        ({"pipeline": 2}, 1, MODEL / 2),
        ({"pipeline": 2, "chunks": 2}, 1, MODEL / 2),
        ({"pipeline": 1, "tensor_parallel_size": 2, "tensor_parallel_plan": PLAN}, 1, MODEL / 2),
    ],
    ids=["zero3", "pipeline", "chunks", "tensor"],
)
def test_a_rank_holds_its_share_and_one_part_of_the_model(layout, data, share):
    blocks = [f"blocks.{i}" for i in range(DEPTH)]
    for rank, (most, parts) in enumerate(run_trainers(2, kept, layout, data)):
        assert MODEL / 2 <= most <= share + PART, (rank, most / PART)
        made = {part for part in parts if part in blocks}
        if layout.get("chunks") == 2:
            assert made == {f"blocks.{i}" for i in range(DEPTH) if i // 2 % 2 == rank}
        elif layout["pipeline"] == 2:
            assert made == set(blocks[rank * 4 : rank * 4 + 4])
        else:
            assert made == set(blocks)
