"""Hybrid parallel training for PyTorch Lightning, with the numbers of one process.

Importing the package registers its strategies, so that `Trainer(strategy="hybrid_ptdp")` finds them.
"""

from functools import partial

from lightning.pytorch.strategies import StrategyRegistry

from lightning_hybrid.parallel.checkpoint.latest import latest_checkpoint
from lightning_hybrid.parallel.elastic import EXIT_FOR_MORE_REPLICAS
from lightning_hybrid.parallel.pipeline.auxiliary import add_auxiliary_loss
from lightning_hybrid.precision import FP16MasterWeights, MasterWeights
from lightning_hybrid.strategies import precisions
from lightning_hybrid.strategies.costs import measure_costs
from lightning_hybrid.strategies.deepspeed import HybridDeepSpeedStrategy
from lightning_hybrid.strategies.hybrid import HybridPTDPStrategy
from lightning_hybrid.strategies.launching import REFUSED, refuse_launcher

__all__ = [
    "EXIT_FOR_MORE_REPLICAS",
    "HybridDeepSpeedStrategy",
    "HybridPTDPStrategy",
    "add_auxiliary_loss",
    "latest_checkpoint",
    "measure_costs",
]

precisions.replacements |= {
    "bf16-true": lambda plugin: MasterWeights(),
    "16-true": lambda plugin: FP16MasterWeights(),
    "16-mixed": lambda plugin: FP16MasterWeights.of_scaler(plugin.scaler),
}
StrategyRegistry.register(
    HybridPTDPStrategy.strategy_name,
    HybridPTDPStrategy,
    description="Pipeline x tensor x data parallelism for an unmodified LightningModule",
    override=True,
)
for _stage in (1, 2, 3):
    StrategyRegistry.register(
        f"hybrid_zero{_stage}",
        HybridPTDPStrategy,
        description=f"Data parallelism with ZeRO stage {_stage} for an unmodified LightningModule",
        override=True,
        pipeline_parallel_size=1,
        zero_stage=_stage,
    )
StrategyRegistry.register(
    HybridDeepSpeedStrategy.strategy_name,
    HybridDeepSpeedStrategy,
    description="DeepSpeed's ZeRO on CPUs, to compare with",
    override=True,
)
for _kind in REFUSED:
    StrategyRegistry.register(
        f"{HybridPTDPStrategy.strategy_name}_{_kind}",
        partial(refuse_launcher, _kind),
        description="Refused, with the reason",
        override=True,
    )
