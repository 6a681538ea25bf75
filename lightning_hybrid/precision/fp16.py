"""float16 compute over float32 masters, with a loss scale that all ranks share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hybrid.compat import before_step, forget_step, unscale
from lightning_hybrid.functional.loss_scale import ScaleRule, ScaleState, next_scale, weight_unit
from lightning_hybrid.functional.trees import leaves_of
from lightning_hybrid.parallel.data_parallel import maxima
from lightning_hybrid.parallel.gradients import local
from lightning_hybrid.parallel.pipeline.microbatch import batch_size
from lightning_hybrid.precision.master_weights import MasterWeights

MAX_SKIPPED = 100  # steps in a row, with a scale that does not move
NAMED = 5  # parameters in an error


class FP16MasterWeights(MasterWeights):
    """float16 compute over float32 parameters, gradients and optimizer states, with a loss scale.

    Losses are multiplied by the scale before they are differentiated, gradients divided by it in float32 behind all
    sums, before `on_before_optimizer_step` and clipping see them. Where any gradient on any rank is not finite, all
    ranks skip the step: weights, optimizer states, `global_step` and schedulers that count steps stay, and the scale
    backs off.

    Args:
        loss_scale: "dynamic", or a number that stays.
        init_scale: Where a dynamic scale starts.
        growth_factor: What it is multiplied by after `growth_interval` steps without overflow.
        backoff_factor: What it is multiplied by after an overflow.
        growth_interval: Steps without overflow before it grows.
        hysteresis: Overflows that it takes to back off; each further one does too, until growth starts the count again.
        min_scale: Under it training ends with an error that names the parameters whose gradients overflowed.
        max_scale: It does not grow further.

    Attributes:
        rule: How a dynamic scale moves; None for one that stays.
        state: Where the scale stands; a checkpoint keeps it.
        is_skipped: Whether the last step was skipped.

    Raises:
        ValueError: If a number is out of range.

    Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.
    """

    precision: Literal["bf16-true", "16-true"] = "16-true"
    compute_dtype = torch.float16

    def __init__(
        self,
        loss_scale: Literal["dynamic"] | float = "dynamic",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_scale: float = 1.0,
        max_scale: float = 2.0**32,
    ) -> None:
        super().__init__()
        rule = ScaleRule(growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale)
        start = init_scale if loss_scale == "dynamic" else loss_scale
        if isinstance(start, str | bool) or not (0 < start < math.inf):
            wrong = f"init_scale={init_scale!r} must be"
            if loss_scale != "dynamic":
                wrong = f"loss_scale={loss_scale!r} must be 'dynamic' or"
            raise ValueError(f"{wrong} a finite number above 0.")
        if loss_scale == "dynamic" and not min_scale <= init_scale <= max_scale:
            raise ValueError(f"init_scale={init_scale} is not between min_scale={min_scale} and max_scale={max_scale}.")
        self.rule = rule if loss_scale == "dynamic" else None
        self.state = ScaleState(float(start))
        self.is_skipped = False
        self._unit: float | None = None

    @classmethod
    def of_scaler(cls, scaler: torch.amp.GradScaler | None) -> FP16MasterWeights:
        """With the numbers of a scaler that Lightning's plugin was given."""
        if scaler is None or not scaler.is_enabled():
            return cls() if scaler is None else cls(loss_scale=1.0)
        return cls(
            init_scale=scaler.get_scale(),
            growth_factor=scaler.get_growth_factor(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_interval=scaler.get_growth_interval(),
        )

    @property
    @override
    def loss_scale(self) -> float:
        """What losses are multiplied by in the coming step."""
        return self.state.scale

    @override
    def unit_of(self, batch: Any) -> float:
        """Power of two by which loss weights are divided; all replicas call it together.

        That of the weights of the window before; in the first one that of the batch's whole numbers, such as tokens and
        labels, or of its samples.
        """
        if self._unit is None:
            counts = [leaf.numel() for leaf in leaves_of(batch) if isinstance(leaf, Tensor) and _is_whole(leaf)]
            (count,) = maxima(self.engine.mesh, max([batch_size(batch), *counts]))
            self._unit = weight_unit(count)
        return self._unit

    @override
    def heed_weight(self, weight: float) -> None:
        """Divide by it from the next window on; 0 says that the step returns none."""
        if weight > 0:
            self._unit = weight_unit(weight)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Take one step, or skip it on all ranks."""
        result = closure()
        self.is_skipped = self._unscale(optimizer)
        before_step(self, model, optimizer)
        self.state = next_scale(self.state, self.rule, overflow=self.is_skipped)
        if self.is_skipped:
            self._check_state()
            forget_step(model.trainer)
        else:
            optimizer.step(**kwargs)
        return result

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**asdict(self.state), "weight_unit": self._unit}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self._unit = state.pop("weight_unit")
        scale = state.pop("scale") if self.rule is not None else self.state.scale  # one that was asked for stays
        self.state = ScaleState(scale, **{key: value for key, value in state.items() if key != "scale"})

    def _unscale(self, optimizer: Optimizer) -> bool:
        """Divide all gradients by the scale, once; whether any of them is not finite on any rank."""
        device = self.engine.mesh.device
        held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        by_device: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for gradient in (local(parameter.grad) for parameter in held):
            gradient = torch.view_as_real(gradient) if gradient.is_complex() else gradient
            if gradient.numel():
                by_device.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        found = torch.zeros(1, device=device)
        for (where, _), gradients in by_device.items():
            here = torch.zeros(1, device=where)
            unscale(gradients, here, torch.full_like(here, 1.0 / self.state.scale))
            found += here.to(device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found)

    def _check_state(self) -> None:
        """End a training that only overflows.

        Raises:
            RuntimeError: On every rank, naming the parameters.
        """
        scale, rule = self.state.scale, self.rule
        if rule is not None and scale < rule.min_scale:
            what = f"The loss scale fell to {scale:g}, under min_scale={rule.min_scale:g}"
        elif rule is None and self.state.skipped >= MAX_SKIPPED:
            what = f"{self.state.skipped} steps in a row were skipped with loss_scale={scale:g}"
        else:
            return
        names = self._overflown()
        shown = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
        raise RuntimeError(
            f"{what}: gradients of {shown or 'parameters'} are not finite, after {self.state.applied} applied steps. "
            "If precision='32-true' has the same, lower the learning rate or clip gradients; else take "
            "precision='bf16-true', which has float32's range."
        )

    def _overflown(self) -> list[str]:
        """Names of parameters whose gradients are not finite, over all ranks, which call it together."""
        named = self.engine.named_parameters().items()
        mine = [name for name, p in named if p.grad is not None and not local(p.grad).isfinite().all()]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return list(dict.fromkeys(name for names in everyone for name in names))


def _is_whole(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool
