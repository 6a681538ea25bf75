"""Hybrid parallel training for PyTorch Lightning, with the numbers of one process.

Importing the package registers its strategies, so that `Trainer(strategy="hybrid_ptdp")` finds them.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_hybrid.parallel.auxiliary import add_auxiliary_loss
from lightning_hybrid.strategies.costs import measure_costs
from lightning_hybrid.strategies.hybrid import HybridPTDPStrategy

__all__ = ["HybridPTDPStrategy", "add_auxiliary_loss", "measure_costs"]

StrategyRegistry.register(
    HybridPTDPStrategy.strategy_name,
    HybridPTDPStrategy,
    description="Pipeline x tensor x data parallelism for an unmodified LightningModule",
    override=True,
)
