"""Gradient norms and clipping over the whole model instead of this rank's part."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning.pytorch.plugins import Precision
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_hybrid.parallel.engine import Engine
from lightning_hybrid.parallel.gradients import gradient_norm, local, scale_gradients

EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_
NORMS = frozenset({"norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm", "_foreach_norm"})


class NormWatch(TorchFunctionMode):
    """Context that warns, once, where a hook takes a norm: of gradients it would cover this rank's parameters only.

    `norm` of a sharded gradient is that of all its shards, as a plain tensor: `lightning.pytorch.utilities.grad_norm`
    makes numbers of it.

    Attributes:
        hook: Name of the hook that runs.
        paused: Our own norms, which cover the whole model, are being taken.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hook, self.paused, self._has_warned = "", False, False

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in NORMS and not self.paused and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self.hook} takes a norm. If it is one of gradients, it covers the parameters of this rank alone, "
                "and differs from the whole model's: clip with gradient_clip_val or self.clip_gradients, which count "
                "every parameter once, and log self.trainer.strategy.gradient_norm(optimizer).",
                stacklevel=2,
            )
        result = func(*args, **(kwargs or {}))
        return result.full_tensor() if name == "norm" and isinstance(result, DTensor) else result


class Clipping:
    """Takes the place of a precision plugin's clipping, which sees only what an optimizer on this rank holds.

    Attributes:
        last_norm: Norm of the gradients that were last clipped by their norm, before that: a float64 scalar, equal on
            all ranks; None before the first time.
    """

    def __init__(self, engine: Engine, precision: Precision, watch: NormWatch | None = None) -> None:
        self._engine, self._precision, self._watch = engine, precision, watch or NormWatch()
        self.last_norm: Tensor | None = None
        vars(precision).update(clip_grad_by_norm=self.by_norm, clip_grad_by_value=self.by_value)

    def remove(self) -> None:
        """Give the plugin its own clipping back."""
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            vars(self._precision).pop(name, None)

    def by_norm(self, optimizer: Optimizer, clip_val: float | int) -> None:
        """Scale all gradients so that their norm is at most `clip_val`."""
        if clip_val <= 0:
            return
        norm = self.last_norm = self.norm(optimizer)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        scale_gradients(held, (clip_val / (norm + EPSILON)).clamp(max=1.0))

    def by_value(self, optimizer: Optimizer, clip_val: float | int) -> None:
        """Limit each element to [-clip_val, clip_val]."""
        if clip_val <= 0:
            return
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None:
                local(parameter.grad).clamp_(-clip_val, clip_val)

    def norm(self, optimizer: Optimizer) -> Tensor:
        """2-norm of the gradients of all parameters that the optimizer has on any rank: a float64 scalar."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        counted = [p for p in self._engine.counted_parameters() if id(p) in held]
        self._watch.paused = True
        try:
            return gradient_norm(counted, device=self._engine.mesh.device)
        finally:
            self._watch.paused = False
