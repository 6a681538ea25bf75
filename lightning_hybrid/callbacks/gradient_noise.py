"""Annealed normal noise on gradients, the same in every layout."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hybrid.callbacks.applied_steps import AppliedSteps
from lightning_hybrid.callbacks.arguments import check_whole
from lightning_hybrid.compat import is_flattened
from lightning_hybrid.functional.noise import add_noise, noise_deviation
from lightning_hybrid.parallel.gradient_parts import held_parts


class GradientNoise(Callback):
    """Adds normal noise of variance eta / (1 + t) ** gamma to each gradient, before it is clipped.

    t counts the steps that the optimizer has applied; one that is skipped because of an overflow does not count. Noise
    is added once a step: after gradients have been accumulated, summed over replicas and unscaled. It depends on the
    seed, t and the parameter's name in the unmodified module, so that copies of a parameter get the same and shards
    their part of the whole's. CPUs and GPUs draw different numbers. A parameter without gradient gets none.

    With manual optimization, noise comes after what the module itself does to gradients before `optimizer.step()`.

    Args:
        eta: Variance at t = 0, in squared units of gradients, above 0; the paper takes 0.01, 0.3 or 1.
        gamma: Power with which it falls, at least 0; the paper takes 0.55.
        seed: Of all numbers, at least 0; the same on every rank.

    Raises:
        ValueError: If an argument is out of range.

    Source: Neelakantan et al. 2015, arXiv:1511.06807, section 3, equations 1 and 2.
    """

    def __init__(self, eta: float = 0.01, gamma: float = 0.55, seed: int = 0) -> None:
        for name, value, good in (("eta", eta, "above 0"), ("gamma", gamma, "of at least 0")):
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
            if not is_number or value < 0 or (value == 0 and name == "eta"):
                raise ValueError(f"{name}={value!r} must be a finite number {good}.")
        check_whole("seed", seed, 0)
        self.eta, self.gamma, self.seed = eta, gamma, seed
        self._applied = AppliedSteps()
        self._has_noise = False  # on the gradients of the step that runs

    @property
    def steps(self) -> list[int]:
        """Applied steps of each optimizer: t of the next one."""
        return list(self._applied.counts)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._applied.reset()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise ValueError(
                f"GradientNoise cannot work under {type(trainer.strategy).__name__}: DeepSpeed keeps gradients in flat "
                "buffers of its own. Use strategy='hybrid_ptdp' with zero_stage=1, 2 or 3."
            )
        if getattr(trainer.precision_plugin, "scaler", None) is not None and any(map(_is_fused, trainer.optimizers)):
            raise ValueError(
                f"precision={trainer.precision!r} leaves gradients scaled for an optimizer with fused=True, and noise "
                "would be divided by the scale. Leave fused out."
            )
        for name, module in pl_module.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise ValueError(f"{name} has sparse=True, and noise makes all gradients dense. Set sparse=False.")
        self._check_parameters(trainer, pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._has_noise = False
        self._applied.start(trainer.optimizers, type(self).__name__, self._check_noise)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        step = self._applied.counts[trainer.optimizers.index(optimizer)]
        deviation = noise_deviation(step, self.eta, self.gamma)
        _check_dense(pl_module, optimizer)
        ask = getattr(trainer.strategy, "gradient_parts", None)
        parts = ask(optimizer) if ask is not None else held_parts(pl_module.named_parameters(), optimizer)
        for name, part in parts.items():
            for piece in part.pieces:
                add_noise(piece.data, part.shape, piece.box, deviation, (self.seed, name, step))
        self._has_noise = True

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._applied.stop()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._applied.stop()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._applied.state()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._applied.restore(state_dict["steps"])

    def _check_noise(self, number: int) -> None:
        """Refuse steps that went past Lightning, which manual optimization can take."""
        if not self._has_noise:
            raise RuntimeError(
                f"Optimizer {number} has stepped without Lightning's hooks, and so without noise. Step with what "
                "self.optimizers() returns."
            )
        self._has_noise = False

    def _check_parameters(self, trainer: Trainer, pl_module: LightningModule) -> None:
        names = {id(parameter): name for name, parameter in pl_module.named_parameters()}
        is_ours = hasattr(trainer.strategy, "gradient_parts")  # it has checked names itself
        for optimizer, parameter in _held(trainer):
            kind, shape = type(optimizer).__name__, list(parameter.shape)
            if parameter.is_complex():
                raise ValueError(f"{kind} holds a complex parameter of shape {shape}: GradientNoise needs real ones.")
            if is_flattened(parameter):
                raise ValueError(
                    f"{kind} holds a parameter that FullyShardedDataParallel has flattened to shape {shape}: noise "
                    "would not be that of the whole. Shard with fully_shard instead (ModelParallelStrategy, or "
                    "strategy='hybrid_ptdp' with zero_stage=3)."
                )
            if not is_ours and id(parameter) not in names:
                raise ValueError(
                    f"{kind} holds a tensor of shape {shape} that is not a parameter of the LightningModule, so that "
                    "GradientNoise has no name of it. Register it as one."
                )


def _held(trainer: Trainer) -> Iterator[tuple[Optimizer, nn.Parameter]]:
    groups = ((optimizer, group) for optimizer in trainer.optimizers for group in optimizer.param_groups)
    return ((optimizer, parameter) for optimizer, group in groups for parameter in group["params"])


def _check_dense(module: LightningModule, optimizer: Optimizer) -> None:
    """Refuse sparse gradients that come from elsewhere than torch's embeddings."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            name = next((name for name, p in module.named_parameters() if p is parameter), "A parameter")
            raise RuntimeError(f"{name} has a sparse gradient, and noise makes all gradients dense. Use a dense one.")


def _is_fused(optimizer: Optimizer) -> bool:
    return any(group.get("fused") for group in optimizer.param_groups)
