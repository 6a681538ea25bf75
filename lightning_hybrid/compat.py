"""Every private name of another library that this package uses, each with its reason; tests/test_compat.py fails if one moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

# The only way to see every operation of a step; torch documents it, but keeps it in a private module.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torchmetrics import Metric


def storage_key(tensor: Tensor) -> int:
    """Identity of a tensor's storage; its address is 0 for every empty storage and changes when FSDP resizes one."""
    return int(tensor.untyped_storage()._cdata)


def version(tensor: Tensor) -> int:
    """How often a tensor's memory has been written in place; inference tensors do not count, so 0 stands for them."""
    return 0 if tensor.is_inference() else int(tensor._version)


def is_view(tensor: Tensor) -> bool:
    """Whether autograd sees the tensor as a view of another."""
    return bool(tensor._is_view())


def is_accumulating(trainer: Trainer) -> bool:
    """Whether the running batch is not the last of its accumulation window; Lightning asks this and tells nobody."""
    return bool(trainer.fit_loop._should_accumulate())


def set_step_value(metric: Metric, value: Any) -> None:
    """Set what Lightning logs with `on_step=True` for a metric object: `forward` keeps it in a private attribute."""
    metric._forward_cache = value
