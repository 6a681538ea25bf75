"""What ZeRO stages keep and send, in units of the formulas, for a small GPT on two ranks.

``python benchmarks/zero.py`` runs all cases, ``python benchmarks/zero.py CASE`` one of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import fit, report, run
from lightning.pytorch import Callback, seed_everything
from typing_extensions import override

from examples.gpt import GPT
from lightning_hybrid import HybridPTDPStrategy
from lightning_hybrid.callbacks import CommunicationLedger
from lightning_hybrid.functional.memory import zero_state_bytes
from lightning_hybrid.functional.traffic import zero_bytes
from lightning_hybrid.parallel.gradients import local

NUM_RANKS, NUM_MICROBATCHES = 2, 2


class Kept(Callback):
    """Most bytes of parameters, gradients and optimizer states behind the backward passes of blocks, and of steps."""

    def __init__(self) -> None:
        self.bytes = 0

    def look(self, trainer: Any) -> None:
        """Count what is there now."""
        held = trainer.strategy.assembly.engine.data.held_parameters()
        states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
        tensors = [*held, *(p.grad for p in held if p.grad is not None), *(value for value in states if value.ndim)]
        storages = [local(tensor.detach()).untyped_storage() for tensor in tensors]
        self.bytes = max(self.bytes, sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for block in pl_module.blocks:
            block.register_full_backward_hook(lambda *_: self.look(trainer))

    @override
    def on_before_optimizer_step(self, trainer: Any, *args: Any) -> None:
        self.look(trainer)


def stage(case: str, zero_stage: int, what: str) -> None:
    """Train three steps, and report bytes in units of the formula."""
    dist.init_process_group("gloo")
    seed_everything(0, verbose=False)
    model, kept, ledger = GPT(width=64, depth=8), Kept(), CommunicationLedger()
    sizes = [sum(p.numel() for p in part.parameters()) for part in (model, model.blocks[0], model.blocks)]
    batches = list(torch.randint(256, (3, 4, 129)))
    strategy = HybridPTDPStrategy(1, num_microbatches=NUM_MICROBATCHES, zero_stage=zero_stage)
    fit(model, batches, devices=NUM_RANKS, strategy=strategy, use_distributed_sampler=False, callbacks=[kept, ledger])
    rows = [t for row, t in ledger.last.items() if row.axis == "data" and row.dtype == "float32"]
    if what == "traffic":
        formula = zero_bytes(
            4 * sizes[0], zero_stage=zero_stage, num_ranks=NUM_RANKS, num_microbatches=NUM_MICROBATCHES
        )
        found, target = sum(traffic.wire for traffic in rows), 1.0
    else:  # besides, a block's gradients and in stage 3 its parameters and those of the next one, and the root's unit
        formula = zero_state_bytes(zero_stage, NUM_RANKS) * sizes[0]
        root = sizes[0] - sizes[2]  # what stands beside these blocks is too small for units
        whole = {0: 0, 1: 0, 2: sizes[1] + root, 3: 3 * sizes[1] + 2 * root}[zero_stage]
        found, target = kept.bytes, 1 + 4 * whole / formula
    report(case, found / formula, round(target, 4), bytes_per_parameter=found / sizes[0])
    dist.destroy_process_group()


CASES = {
    f"{what}_zero{number}": (NUM_RANKS, partial(stage, zero_stage=number, what=what))
    for what in ("memory", "traffic")
    for number in range(4)
}


if __name__ == "__main__":
    run(__file__, __doc__, CASES)
