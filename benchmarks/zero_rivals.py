"""ZeRO's step time beside torch's `fully_shard` under Lightning's `ModelParallelStrategy`, and beside DeepSpeed.

``python benchmarks/zero_rivals.py`` runs all cases, ``python benchmarks/zero_rivals.py CASE`` one of them. Without
DeepSpeed its rows are left out.
"""

from __future__ import annotations

import logging
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from common import run
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from turns import NUM_RANKS, race
from typing_extensions import override

from examples.gpt import GPT
from lightning_hybrid import HybridDeepSpeedStrategy, HybridPTDPStrategy

NUM_SAMPLES = 4  # of 64 bytes, a step and rank
SIZES = {"5m": {"width": 256, "depth": 6}, "50m": {"width": 640, "depth": 10}}
TURNS = {"5m": 60, "50m": 15}


class FusedGPT(GPT):
    """The example's GPT with an optimizer that is fast on a CPU; stage 2 or 3 by hand where Lightning shards nothing.

    Args:
        zero_stage: What `fully_shard` does under `ModelParallelStrategy`.
        sizes: Of the GPT.
    """

    def __init__(self, zero_stage: int, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.zero_stage = zero_stage

    @override
    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            mesh = self.device_mesh["data_parallel"]
            for module in (*self.blocks, self):
                fully_shard(module, mesh=mesh, reshard_after_forward=self.zero_stage == 3)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3, fused=True)


def deepspeed(zero_stage: int) -> Strategy:
    """All parameters are sharded in stage 3, and nothing is clipped."""
    zero = {"stage": zero_stage, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": NUM_SAMPLES,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    return HybridDeepSpeedStrategy(config=config, logging_level=logging.ERROR)


def pieces(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return list(torch.randint(256, (number, NUM_SAMPLES, 65), generator=generator))


def beside(case: str, rival: str, zero_stage: int, size: str, target: float) -> None:
    dist.init_process_group("gloo")  # one for both: two threads cannot make one each
    other = ModelParallelStrategy(NUM_RANKS, 1) if rival == "fully_shard" else deepspeed(zero_stage)
    strategies = {"ours": HybridPTDPStrategy(1, zero_stage=zero_stage), rival: other}
    make = partial(FusedGPT, zero_stage, **SIZES[size])
    race(case, make, strategies, pieces, target, num_turns=TURNS[size])


TARGETS = {("fully_shard", "5m"): 1.03, ("deepspeed", "5m"): 1.1, ("deepspeed", "50m"): 1.0}
CASES = {
    f"{rival}_zero{stage}_{size}": (NUM_RANKS, partial(beside, rival=rival, zero_stage=stage, size=size, target=target))
    for (rival, size), target in TARGETS.items()
    for stage in (2, 3)
    if rival != "deepspeed" or find_spec("deepspeed")
}


if __name__ == "__main__":
    run(__file__, __doc__, CASES)
