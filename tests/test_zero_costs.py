"""What ZeRO stages send, and what they keep: the formulas, counted."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import nn

from lightning_hybrid.callbacks import CommunicationLedger
from lightning_hybrid.functional.memory import zero_state_bytes
from lightning_hybrid.functional.traffic import ring_bytes, zero_bytes
from lightning_hybrid.parallel.gradients import local
from tests.launch import run_trainers
from tests.small import WIDTH, Small, fit, hybrid, loader

BATCH = 8


class Even(Small):
    """Two ranks share everything without padding; both ends are large enough to be units of their own."""

    def __init__(self):
        super().__init__()
        self.outlet = nn.Linear(WIDTH, 4).double()

    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self(x), y.expand(-1, 4))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.rate)


def sent(strategy, accumulate=1):
    """Bytes over the data axis in the third step, by collective, and those of the parameters that are here."""
    ledger = CommunicationLedger()
    train = loader(3 * accumulate * BATCH, BATCH, 2)
    trainer = fit(Even(), train, strategy, callbacks=[ledger], accumulate_grad_batches=accumulate)
    counted = {}
    for row, traffic in ledger.last.items():
        if row.axis == "data" and row.dtype == "float64":
            counted[row.collective] = counted.get(row.collective, 0) + traffic.wire
    here = trainer.strategy.assembly.engine.named_parameters().values()
    return counted, sum(p.numel() * p.element_size() for p in here)


def check_formula(pipeline, stage, microbatches, accumulate):
    strategy = hybrid(pipeline, microbatches=microbatches, zero_stage=stage)
    counted, size = sent(strategy, accumulate)
    number = microbatches * accumulate
    assert sum(counted.values()) == zero_bytes(size, zero_stage=stage, num_ranks=2, num_microbatches=number)
    once = ring_bytes("all_to_all", size, 2)
    assert counted.get("all_to_all", 0) == {0: 0, 1: 1, 2: number, 3: number}[stage] * once


def check_copies(stage, microbatches):
    """Gathers and scatters go within a group of two; what it has summed goes to the other group once a step."""
    ledger = CommunicationLedger()
    strategy = hybrid(1, microbatches=microbatches, zero_stage=stage, replicate_size=2)
    trainer = fit(Even(), loader(3 * BATCH, BATCH, 4), strategy, callbacks=[ledger])
    size = sum(p.numel() * p.element_size() for p in trainer.lightning_module.parameters())
    rows = [(row, traffic) for row, traffic in ledger.last.items() if row.axis == "data" and row.dtype == "float64"]
    summed = sum(traffic.wire for row, traffic in rows if row.collective == "all_reduce")
    assert summed == ring_bytes("all_reduce", size / 2, 2)
    rest = sum(traffic.wire for row, traffic in rows if row.collective != "all_reduce")
    assert rest == zero_bytes(size, zero_stage=stage, num_ranks=2, num_microbatches=microbatches)


def two_replicas():
    for stage, microbatches, accumulate in product(range(4), (1, 3), (1, 2)):
        check_formula(1, stage, microbatches, accumulate)


def four_ranks():
    for stage, microbatches in product((1, 2, 3), (1, 2)):
        check_copies(stage, microbatches)
        check_formula(2, stage, microbatches, 1)


@pytest.mark.parametrize(("size", "function"), [(2, two_replicas), (4, four_ranks)])
def test_traffic_is_what_the_formula_says(size, function):
    run_trainers(size, function, timeout=200)


class Peak(Callback):
    """Most bytes of parameters, gradients and states at the ends of forward passes, of backward passes and of units."""

    def __init__(self):
        self.bytes = 0

    def look(self, trainer):
        held = trainer.strategy.assembly.engine.data.held_parameters()
        states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
        tensors = [*held, *(p.grad for p in held if p.grad is not None), *(s for s in states if s.ndim)]
        storages = {local(t.detach()).untyped_storage()._cdata: local(t.detach()).untyped_storage() for t in tensors}
        self.bytes = max(self.bytes, sum(storage.nbytes() for storage in storages.values()))

    def on_train_start(self, trainer, pl_module):
        for module in (*pl_module.blocks, pl_module.outlet):
            module.register_full_backward_hook(lambda *_: self.look(trainer))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.look(trainer)

    def on_train_batch_end(self, trainer, *args):
        self.look(trainer)


def kept():
    found = []
    for stage in range(4):
        peak = Peak()
        fit(Even(), loader(3 * BATCH, BATCH, 2), hybrid(1, zero_stage=stage), callbacks=[peak])
        found.append(peak.bytes)
    return found


def test_memory_is_what_the_formula_says():
    """Besides, a unit has its gradients whole in stage 2, and in stage 3 its parameters and those fetched ahead too."""
    module = Even()
    size, unit = (sum(p.numel() for p in m.parameters()) * 2 for m in (module, module.blocks[0]))  # of 8 bytes each
    for found in run_trainers(2, kept):
        law = [zero_state_bytes(stage, 2) * size for stage in range(4)]
        assert found[0] == law[0]
        assert law[1] - 8 * unit <= found[1] <= law[1]
        assert law[2] - 4 * unit <= found[2] <= law[2] + 2 * 4 * unit
        assert law[3] <= found[3] <= law[3] + 4 * 4 * unit
