"""What ZeRO stages keep, gather and send, in units of the formulas, for a small GPT on two ranks.

``python benchmarks/zero.py`` runs all cases, ``python benchmarks/zero.py CASE`` one of them.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import fit, report, run
from lightning.pytorch import Callback, seed_everything
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import override

from examples.gpt import GPT
from lightning_hybrid import HybridPTDPStrategy
from lightning_hybrid.callbacks import CommunicationLedger
from lightning_hybrid.compat import sharded_records
from lightning_hybrid.functional.memory import zero_state_bytes
from lightning_hybrid.functional.traffic import zero_bytes
from lightning_hybrid.parallel.gradients import BUCKET_BYTES, local
from lightning_hybrid.parallel.ledgers.traffic import Counts, Traffic

NUM_RANKS, NUM_MICROBATCHES = 2, 2
BATCHES = list(torch.randint(256, (3, 4, 129), generator=torch.Generator().manual_seed(0)))


class Kept(Callback):
    """Most bytes of parameters, gradients and optimizer states behind the backward passes of blocks, and of steps."""

    def __init__(self) -> None:
        self.bytes = 0

    def look(self, trainer: Any) -> None:
        """Count what is there now."""
        data = trainer.strategy.assembly.engine.data
        held, waiting = data.held_parameters(), data.waiting_gradients() if hasattr(data, "waiting_gradients") else []
        states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
        tensors = [
            *held,
            *waiting,
            *(p.grad for p in held if p.grad is not None),
            *(value for value in states if value.ndim),
        ]
        storages = [local(tensor.detach()).untyped_storage() for tensor in tensors]
        self.bytes = max(self.bytes, sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for block in pl_module.blocks:
            block.register_full_backward_hook(lambda *_: self.look(trainer))

    @override
    def on_before_optimizer_step(self, trainer: Any, *args: Any) -> None:
        self.look(trainer)


class Gathered(Callback):
    """Most bytes of whole parameters, and of the buffers that they are gathered into, while blocks run."""

    def __init__(self) -> None:
        self.bytes = 0
        self.buffers: list[tuple[StorageWeakRef, int]] = []

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make a buffer, as `fully_shard` asks for it."""
        buffer = torch.empty(*size, dtype=dtype, device=device)
        self.buffers.append((StorageWeakRef(buffer.untyped_storage()), buffer.nbytes))
        return buffer

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        """Gather, as `fully_shard` does."""
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)

    def look(self) -> None:
        """Count what is there now."""
        time.sleep(0.005)  # a thread of gloo lets go of a buffer a moment after its work
        self.buffers = [(storage, size) for storage, size in self.buffers if not storage.expired()]
        whole = [t.untyped_storage().nbytes() for record in self.records for t in record.all_gather_outputs]
        self.bytes = max(self.bytes, sum(whole) + sum(size for _, size in self.buffers))

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1:  # the first step shards
            return
        units = [module for module in trainer.strategy.assembly.engine.data.modules if sharded_records(module)]
        self.records = [record for module in units for record in sharded_records(module)]
        for module in units:
            module.set_custom_all_gather(self)
        for block in pl_module.blocks:
            block.register_forward_hook(lambda *_: self.look())
            block.register_full_backward_hook(lambda *_: self.look())


def train(
    model: GPT, zero_stage: int, batches: list[Tensor], *callbacks: Callback, pipeline: int = 1, **options: Any
) -> None:
    """Train on each batch once."""
    strategy = HybridPTDPStrategy(pipeline, num_microbatches=NUM_MICROBATCHES, zero_stage=zero_stage)
    options |= {"devices": NUM_RANKS, "use_distributed_sampler": False, "callbacks": list(callbacks)}
    fit(model, batches, strategy=strategy, **options)


def data_rows(counts: Counts) -> list[Traffic]:
    """What went over the data axis, of parameters and gradients."""
    return [traffic for row, traffic in counts.items() if row.axis == "data" and row.dtype == "float32"]


def sizes_of(model: GPT) -> tuple[int, int, int]:
    """Parameters of the model, of a unit, and of what is beside the blocks, which is too small for units.

    Blocks are small here, so that a unit is a quarter of them: two of eight.
    """
    whole, blocks = (sum(p.numel() for p in m.parameters()) for m in (model, model.blocks))
    return whole, blocks // 4, whole - blocks


def memory(case: str, zero_stage: int, masters: bool = False) -> None:
    """Bytes in units of the formula, with the units that are whole meanwhile."""
    model, kept = GPT(width=64, depth=8), Kept()
    size, unit, root = sizes_of(model)
    train(model, zero_stage, BATCHES, kept, precision="bf16-true" if masters else "32-true")
    behind = sum(p.numel() for module in (model.norm, model.head) for p in module.parameters())
    # whole besides: gradients of a unit and of what is behind them all, in stage 3 a unit's and the root's parameters
    whole = {0: 0, 1: 0, 2: unit + behind, 3: 2 * unit + root + behind}[zero_stage]
    if masters and zero_stage < 2:
        whole = size  # gradients of the last micro-batch: this model is smaller than a bucket
    law = zero_state_bytes(zero_stage, NUM_RANKS, masters=masters) * size
    expected = law + (2 if masters else 4) * whole
    report(case, kept.bytes / expected, 1.02, bytes_per_parameter=kept.bytes / size, law=law / size)


def traffic(case: str, zero_stage: int) -> None:
    """Bytes in units of the formula."""
    model, ledger = GPT(width=64, depth=8), CommunicationLedger()
    size = 4 * sizes_of(model)[0]
    train(model, zero_stage, BATCHES, ledger)
    formula = zero_bytes(size, zero_stage=zero_stage, num_ranks=NUM_RANKS, num_microbatches=NUM_MICROBATCHES)
    report(case, sum(row.wire for row in data_rows(ledger.last)) / formula, 1.0)


def gathered(case: str) -> None:
    """Whole parameters in stage 3, in units of two of its units and what is beside them."""
    model, watch = GPT(width=64, depth=8), Gathered()
    size, unit, root = sizes_of(model)
    train(model, 3, BATCHES, watch)
    report(case, watch.bytes / (4 * (2 * unit + root)), 1.02, share_of_model=watch.bytes / (4 * size))


def messages(case: str, zero_stage: int) -> None:
    """The largest message of a model of 50 MB and of one twice as deep, in units of a bucket."""
    found = []
    for depth in (4, 8):
        ledger = CommunicationLedger()
        train(GPT(width=512, depth=depth), zero_stage, [batch[:, :9] for batch in BATCHES[:2]], ledger)
        found.append(max(row.largest for row in data_rows(ledger.total)) / BUCKET_BYTES)
    report(case, found[1], 1.0, half_as_deep=found[0])


class Resident(Callback):
    """Pages of this process before some steps, when what nobody holds has been given back (on Linux)."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.pages = steps, list[int]()

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in self.steps:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            self.pages.append(int(Path("/proc/self/statm").read_text().split()[1]))


def growth(case: str, zero_stage: int, pipeline: int) -> None:
    """Memory before the last of 200 steps of 120 lengths, in units of that before the 50th; the longest comes first."""
    order = torch.randperm(120, generator=torch.Generator().manual_seed(0)).tolist()
    lengths = [128, *(8 + order[step % 120] for step in range(199))]
    batches = [torch.randint(256, (4, length)) for length in lengths]
    resident = Resident(50, 199)
    train(GPT(width=64, depth=4), zero_stage, batches, resident, pipeline=pipeline)
    before, after = resident.pages
    report(case, after / before, 1.02)


def ranks(measure: Callable[..., None], **options: int) -> tuple[int, Callable[[str], None]]:
    """A case: what each of the ranks runs."""

    def run_case(case: str) -> None:
        dist.init_process_group("gloo")
        seed_everything(0, verbose=False)
        measure(case, **options)
        dist.destroy_process_group()

    return NUM_RANKS, run_case


CASES = {
    **{f"memory_zero{stage}": ranks(memory, zero_stage=stage) for stage in range(4)},
    **{f"memory_masters_zero{stage}": ranks(memory, zero_stage=stage, masters=True) for stage in range(4)},
    "gathered_zero3": ranks(gathered),
    **{f"traffic_zero{stage}": ranks(traffic, zero_stage=stage) for stage in range(4)},
    **{f"messages_zero{stage}": ranks(messages, zero_stage=stage) for stage in range(4)},
    **{f"growth_zero{stage}": ranks(growth, zero_stage=stage, pipeline=1) for stage in (1, 3)},
    "growth_pipeline": ranks(growth, zero_stage=1, pipeline=2),
}


if __name__ == "__main__":
    run(__file__, __doc__, CASES)
