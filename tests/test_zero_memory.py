"""What ZeRO stages keep for a while: gathered parameters, buffers of messages, and what is left of changing shapes."""

import gc
import time
import weakref
from contextlib import contextmanager
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing import assert_close
from torch.utils.data import DataLoader

from lightning_hybrid.callbacks import CommunicationLedger
from lightning_hybrid.compat import sharded_records
from lightning_hybrid.parallel import gradients, reduction
from lightning_hybrid.parallel.pipeline import planner
from lightning_hybrid.parallel.zero import units
from tests.launch import run_trainers
from tests.small import WIDTH, Small, fit, hybrid, loader, weights

BATCH, BLOCK = 8, (WIDTH + 1) * WIDTH * 8  # bytes of a block's parameters


class Deep(Small):
    depth = 10


@contextmanager
def small_buckets(number_of_blocks=2.5):
    """Context in which buckets are as small beside a small model as they usually are beside a large one."""
    size = int(number_of_blocks * BLOCK)
    first, second = patch.multiple(gradients, BUCKET_BYTES=size), patch.multiple(reduction, FIRST_BUCKET_BYTES=size)
    with first, second, patch.multiple(units, GROUP_BYTES=0):
        yield


def largest(model, stages, pipeline, data):
    """Bytes of the largest message of each collective over the replicas, for each stage."""
    found = []
    with small_buckets():
        for stage in stages:
            ledger = CommunicationLedger()
            fit(model(), loader(2 * BATCH, BATCH, data), hybrid(pipeline, zero_stage=stage), callbacks=[ledger])
            rows = [(row, t.largest) for row, t in ledger.total.items() if (row.axis, row.dtype) == ("data", "float64")]
            names = {row.collective for row, _ in rows}
            found.append({name: max(size for row, size in rows if row.collective == name) for name in names})
    return found


@pytest.mark.parametrize(("pipeline", "size"), [(1, 2), (2, 4)])
def test_messages_do_not_grow_with_the_model(pipeline, size):
    stages = [0, 1, 2, 3]
    shallow, deep = (run_trainers(size, largest, model, stages, pipeline, 2) for model in (Small, Deep))
    assert shallow == deep
    for found in shallow:
        assert [set(of_stage) for of_stage in found] == [{"all_reduce"}, *[{"all_gather", "all_to_all"}] * 3]
        assert all(size <= 2.5 * BLOCK for of_stage in found for size in of_stage.values())


class Dropping(Small):
    """Each replica skips blocks by its own dice, and one parameter is used on one replica alone."""

    def __init__(self):
        super().__init__()
        self.sometimes = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x):
        x = self.inlet(x)
        dice = int(1e6 * float(x.detach().abs().sum()))
        for index, block in enumerate(self.blocks):
            x = block(x) if (dice >> index) % 2 else x
        return self.outlet(x * self.sometimes if dice % 2 else x)


def dropped(stages):
    with small_buckets(0.7):
        train = [hybrid(1, zero_stage=stage) for stage in stages]
        return [weights(fit(Dropping(), loader(6 * BATCH, BATCH, 2), strategy)) for strategy in train]


def test_replicas_may_call_different_modules_in_stage_1_whatever_the_buckets_are():
    plain, sharded = run_trainers(2, dropped, [0, 1])[0]
    assert_close(sharded, plain, rtol=1e-9, atol=1e-12)


class Gathers:
    """Gathers as `fully_shard` does, and knows which buffers are alive."""

    def __init__(self):
        self.alive = []

    def allocate(self, size, *, dtype, device):
        buffer = torch.empty(*size, dtype=dtype, device=device)
        self.alive.append((StorageWeakRef(buffer.untyped_storage()), buffer.untyped_storage().nbytes()))
        return buffer

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)

    def bytes(self):
        self.alive = [(storage, size) for storage, size in self.alive if not storage.expired()]
        return sum(size for _, size in self.alive)


class Gathered(Callback):
    """Most bytes of whole parameters, and of buffers that they are gathered into, in passes of units either way."""

    def __init__(self, bound):
        self.bound, self.peaks, self.looks = bound, {"forward": 0, "backward": 0}, 0

    def count(self):
        whole = sum(t.untyped_storage().nbytes() for record in self.records for t in record.all_gather_outputs)
        return whole + self.gathers.bytes()

    def look(self, direction):
        self.looks += 1
        found, waits = self.count(), 0
        while found > self.bound and waits < 1000:  # a thread of gloo lets go of a buffer a moment after its work
            time.sleep(0.001)
            found, waits = self.count(), waits + 1
        self.peaks[direction] = max(self.peaks[direction], found)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 1:  # everything is settled
            modules = [module for module in trainer.strategy.assembly.engine.data.modules if sharded_records(module)]
            self.records, self.gathers = [record for m in modules for record in sharded_records(m)], Gathers()
            for module in modules:
                module.set_custom_all_gather(self.gathers)
            for module in (pl_module.inlet, *pl_module.blocks, pl_module.outlet):
                module.register_forward_pre_hook(lambda *_: self.look("forward"))
                module.register_forward_hook(lambda *_: self.look("forward"))
            for module in (*pl_module.blocks, pl_module.outlet):  # whose inputs have gradients
                module.register_full_backward_pre_hook(lambda *_: self.look("backward"))
                module.register_full_backward_hook(lambda *_: self.look("backward"))


def gathered(pipeline, data, bound, group_bytes):
    watch = Gathered(bound)
    with patch.multiple(units, GROUP_BYTES=group_bytes):
        fit(Growing(), loader(3 * BATCH, BATCH, data), hybrid(pipeline, zero_stage=3), callbacks=[watch])
    return watch.peaks, watch.looks


class Growing(Deep):
    """Each block is larger than the one before it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Perceptron(5 + number) for number in range(10)).double()


class Perceptron(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.grow, self.shrink = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

    def forward(self, x):
        return x + self.shrink(self.grow(x).tanh())


@pytest.mark.parametrize(("pipeline", "size"), [(1, 2), (2, 4)])
def test_stage_3_has_two_units_whole_at_most(pipeline, size):
    """The one that runs and, in either direction, the one that is fetched ahead; besides what is in no unit."""
    unit, rest = 8 * sum(p.numel() for p in Perceptron(14).parameters()), 8 * (WIDTH + 1 + 1)  # padded by one
    peaks = run_trainers(size, gathered, pipeline, 2, 2 * unit + rest, 0)
    assert all(looks >= 20 for _, looks in peaks)
    for direction in ("forward", "backward"):
        most = max(of_rank[direction] for of_rank, _ in peaks)
        assert 1.9 * unit < most <= 2 * unit + rest, (direction, peaks, unit, rest)


def test_stage_3_has_two_units_of_several_blocks_whole_at_most():
    model = Growing()
    sizes = {name: 8 * sum(p.numel() for p in block.parameters()) for name, block in model.blocks.named_children()}
    chosen = units.choose_units(model, None, [f"blocks.{name}" for name in sizes], zero_stage=3)
    of_units = [sum(sizes[name.removeprefix("blocks.")] for name in unit.names) for unit in chosen if unit.is_block]
    assert [len(unit.names) for unit in chosen if unit.is_block] == [3, 2, 2, 1, 1, 1]
    most = max(a + b for a, b in pairwise(of_units))
    rest = 8 * (WIDTH + 1 + 1 + 5 * (WIDTH + 1))  # and rows that pad sizes that two ranks do not divide
    (peaks, _), *_ = run_trainers(2, gathered, 1, 2, most + rest, units.GROUP_BYTES)
    assert all(most <= peak <= most + rest for peak in peaks.values()), (peaks, most, rest)


class Lengths(Small):
    """Takes sequences of any length."""

    depth = 2

    def loss(self, batch):
        x, y = batch
        loss = F.mse_loss(self(x).mean(1), y)
        self.log("loss", loss)
        return loss


class Census(Callback):
    """Counts what is alive before some steps: tensors, storages, their bytes, plans, and all objects."""

    def __init__(self, steps):
        self.steps, self.counts = steps, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx in self.steps:
            self.counts.append(min(self.count(trainer) for _ in range(LOOKS)))

    def count(self, trainer):
        time.sleep(0.01)  # a thread of gloo lets go of a tensor some time after a sum is there
        gc.collect()
        objects = gc.get_objects()
        tensors = [leaf for leaf in objects if issubclass(type(leaf), torch.Tensor)]
        storages = [t.untyped_storage() for t in tensors if not isinstance(t, DTensor)]
        sizes = {storage._cdata: storage.nbytes() for storage in storages}
        plans = trainer.strategy.assembly.engine.planner
        counted = len(tensors), len(sizes), sum(sizes.values()), len(plans._plans) if plans else 0
        return counted, len(objects)


def counted(stages, pipeline, data):
    found = []
    for stage in stages:
        census = Census([STEPS // 2, STEPS - 1])
        x, y = torch.randn(BATCH // data, 1, WIDTH).double(), torch.ones(BATCH // data, 1).double()
        train = DataLoader([(x.expand(-1, 1 + i, -1), y) for i in range(STEPS)], batch_size=None)
        options = {"callbacks": [census], "use_distributed_sampler": False}
        with patch.object(planner, "REMEMBERED", 20):
            fit(Lengths(), train, hybrid(pipeline, zero_stage=stage), **options)
        found.append(census.counts)
    return found


STEPS, LOOKS = 200, 5


@pytest.mark.parametrize(("pipeline", "stages"), [pytest.param(1, [1, 3], marks=pytest.mark.full), (2, [1])], ids=str)
def test_changing_shapes_leave_nothing_behind(pipeline, stages):
    for ranks in run_trainers(2, counted, stages, pipeline, 2 // pipeline, timeout=400):
        for (first, few), (last, many) in ranks:
            assert first == last
            assert first[3] == (20 if pipeline > 1 else 0)
            assert many - few < STEPS // 4  # Lightning keeps a few objects more now and then


def ended(stages):
    """Whether the module, the trainer and the strategy of a fit that is over are still there."""
    found = []
    for stage in stages:
        module = Small()
        trainer = fit(module, loader(2 * BATCH, BATCH, 2), hybrid(1, zero_stage=stage))
        references = [weakref.ref(kept) for kept in (module, trainer, trainer.strategy)]
        del module, trainer
        gc.collect()
        found += [reference() is not None for reference in references]
    return found


def test_nothing_is_left_of_a_fit_that_nobody_holds():
    assert run_trainers(2, ended, [0, 1, 2, 3]) == [[False] * 12] * 2
