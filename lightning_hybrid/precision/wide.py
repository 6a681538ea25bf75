"""Operations whose numbers or results 16 bits cannot hold, in float32 on every device.

Autocast on CUDA devices does that for most of them, on the CPU for losses only: there a layer norm of 16 bits meets a
float32 input with an error. What is missing is added to autocast itself, at torch's dispatcher, so that activation
checkpoints, which autocast again when they recompute, and compiled blocks have it too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.compat import has_kernel

DEVICES = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
NORMS = ("layer_norm", "group_norm", "batch_norm", "instance_norm", "rms_norm")
STATISTICS = {"batch_norm": slice(3, 5), "instance_norm": slice(3, 5)}  # written to if the next argument is true
SUMS = ("sum", "sum.dim_IntList", "mean", "mean.dim", "cumsum", "prod", "prod.dim_int", "logsumexp")
SUMS_OF_SQUARES = (
    "var",
    "var.dim",
    "var.correction",
    "std",
    "std.dim",
    "std.correction",
    "var_mean",
    "var_mean.dim",
    "var_mean.correction",
    "linalg_vector_norm",
    "norm.Scalar",
    "norm.ScalarOpt_dim",
    "dist",
    "cosine_similarity",
)
POWERS = (
    *("exp", "expm1", "log", "log2", "log10", "log1p", "softplus", "rsqrt", "reciprocal"),
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar"),
)
OPERATIONS = ("softmax.int", "log_softmax.int", *NORMS, *SUMS, *SUMS_OF_SQUARES, *POWERS)


class WideOperations:
    """While anybody holds it, autocast on the CPU and on CUDA devices runs `OPERATIONS` in float32 at least.

    Code elsewhere in the process that autocasts meanwhile gets that too; without autocast nothing changes.
    """

    _lock = threading.Lock()
    _holders = 0
    _library: torch.library.Library | None = None

    @classmethod
    def hold(cls) -> None:
        """Add what is missing, unless it is there."""
        with cls._lock:
            cls._holders += 1
            if cls._library is None:
                cls._library = torch.library.Library("aten", "IMPL")
                for device, key in DEVICES.items():
                    for name in OPERATIONS:
                        if not has_kernel(f"aten::{name}", key):
                            cls._library.impl(name, _widened(name, device), key)

    @classmethod
    def release(cls) -> None:
        """Take it back, if nobody else holds it."""
        with cls._lock:
            cls._holders -= 1
            if not cls._holders:
                cls._library = None  # takes the kernels away


def _widened(name: str, device: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
    written = STATISTICS.get(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        wide = [_wide(value) for value in args]
        with torch.autocast(device, enabled=False):
            result = operation(*wide, **{key: _wide(value) for key, value in kwargs.items()})
        if written is not None and args[written.stop]:
            _write_back(wide[written], args[written])
        return result

    return kernel


def _wide(value: Any) -> Any:
    is_narrow = isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize == 2
    return value.float() if is_narrow else value


def _write_back(wide: Sequence[Any], given: Sequence[Any]) -> None:
    """Let running statistics of 16 bits follow their copies in float32."""
    with torch.no_grad():
        for copy, tensor in zip(wide, given, strict=True):
            if copy is not tensor:
                tensor.copy_(copy)
