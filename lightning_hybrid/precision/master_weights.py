"""Precision plugins whose parameters are float32 masters, and whose steps see 16-bit copies of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.pytorch.plugins import Precision
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hybrid.parallel.engine import Engine
from lightning_hybrid.precision.wide import WideOperations


class MasterWeights(Precision):
    """bfloat16 compute over float32 parameters, gradients and optimizer states; it needs no loss scale.

    The module's parameters are the masters: optimizers, hooks, checkpoints see float32. While a step runs, modules show
    copies of 16 bits, which are made when parameters are gathered; sums over replicas are in float32.

    Attributes:
        compute_dtype: Type of the copies, and of matrix products.
        is_skipped: Whether the last step was skipped; never.

    Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.1.
    """

    precision: Literal["bf16-true", "16-true"] = "bf16-true"
    compute_dtype = torch.bfloat16
    is_skipped = False

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._reductions: tuple[Any, Any] | None = None

    @property
    def engine(self) -> Engine:
        """What makes the 16-bit copies; there is one between `bind` and `teardown`."""
        assert self._engine is not None
        return self._engine

    @property
    def loss_scale(self) -> float:
        """bfloat16 has float32's range."""
        return 1.0

    def unit_of(self, batch: Any) -> float:
        """Loss weights cannot overflow."""
        return 1.0

    def heed_weight(self, weight: float) -> None:
        """Nothing depends on it."""

    def bind(self, engine: Engine) -> None:
        """Work with a strategy of this package, until `teardown`.

        Args:
            engine: It makes the 16-bit copies.
        """
        if self._engine is None:
            WideOperations.hold()
            matmul = torch.backends.cuda.matmul
            self._reductions = (
                matmul.allow_fp16_reduced_precision_reduction,
                matmul.allow_bf16_reduced_precision_reduction,
            )
            matmul.allow_fp16_reduced_precision_reduction = False
            matmul.allow_bf16_reduced_precision_reduction = False
        self._engine = engine

    @override
    def teardown(self) -> None:
        if self._engine is not None and self._reductions is not None:
            WideOperations.release()
            matmul = torch.backends.cuda.matmul
            (
                matmul.allow_fp16_reduced_precision_reduction,
                matmul.allow_bf16_reduced_precision_reduction,
            ) = self._reductions
        self._engine = self._reductions = None

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        if self._engine is None:
            raise ValueError(
                f"{type(self).__name__} works with this package's strategies alone, which make the 16-bit copies of "
                "its float32 weights. Choose strategy='hybrid_zero1', which is data parallelism, on one device too, or "
                f"precision='{'16' if self.compute_dtype is torch.float16 else 'bf16'}-mixed' without this plugin."
            )
        return super().connect(model, optimizers, lr_schedulers)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Make masters of parameters that have 16 bits; others stay what they are."""
        for parameter in module.parameters():
            if parameter.is_floating_point() and parameter.dtype.itemsize == 2:
                parameter.data = parameter.data.float()
        return module

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:
        # without its cache: the copies are 16 bits already, and a cached one would outlive its parameter
        with torch.autocast(self.engine.mesh.device.type, dtype=self.compute_dtype, cache_enabled=False):
            yield
