"""Callbacks: one technique or measurement a file, usable with any strategy."""

from lightning_hybrid.callbacks.activation_compression import ActivationCompression
from lightning_hybrid.callbacks.activation_offload import ActivationOffload
from lightning_hybrid.callbacks.activation_recompute import ActivationRecompute
from lightning_hybrid.callbacks.batch_size_growth import BatchSizeGrowth
from lightning_hybrid.callbacks.batch_time_profile import BatchTimeProfile
from lightning_hybrid.callbacks.communication_ledger import CommunicationLedger
from lightning_hybrid.callbacks.divergence_rollback import DivergenceRollback
from lightning_hybrid.callbacks.expert_monitor import ExpertMonitor
from lightning_hybrid.callbacks.gradient_noise import GradientNoise
from lightning_hybrid.callbacks.gradient_noise_scale_monitor import GradientNoiseScaleMonitor
from lightning_hybrid.callbacks.kfac_preconditioner import KFACPreconditioner
from lightning_hybrid.callbacks.learning_rate_scaling import LearningRateScaling
from lightning_hybrid.callbacks.learning_rate_warmup import LearningRateWarmup
from lightning_hybrid.callbacks.memory_ledger import MemoryLedger
from lightning_hybrid.callbacks.optimizer_restart import OptimizerRestart
from lightning_hybrid.callbacks.parameter_offload import ParameterOffload
from lightning_hybrid.callbacks.utilization_monitor import UtilizationMonitor
from lightning_hybrid.callbacks.weight_decay_rules import WeightDecayRules

__all__ = [
    "ActivationCompression",
    "ActivationOffload",
    "ActivationRecompute",
    "BatchSizeGrowth",
    "BatchTimeProfile",
    "CommunicationLedger",
    "DivergenceRollback",
    "ExpertMonitor",
    "GradientNoise",
    "GradientNoiseScaleMonitor",
    "KFACPreconditioner",
    "LearningRateScaling",
    "LearningRateWarmup",
    "MemoryLedger",
    "OptimizerRestart",
    "ParameterOffload",
    "UtilizationMonitor",
    "WeightDecayRules",
]
