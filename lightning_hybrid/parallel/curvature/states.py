"""Factors of all ranks in one checkpoint, and each rank's own out of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.parallel.curvature.factors import RunningFactors
from lightning_hybrid.parallel.curvature.sums import Sums, WindowSums


def gather_states(
    factors: RunningFactors, counted: Collection[str], window: Mapping[str, Sums]
) -> dict[str, dict[str, Any]]:
    """States of all layers in host memory, on world rank 0; empty elsewhere. All ranks call it together.

    Args:
        factors: Of this rank's layers.
        counted: Those that it gives.
        window: Sums of a window that is not at its end, over all replicas; empty without.
    """
    own = {}
    for name in factors.layers:
        if name in counted:
            own[name] = {**factors.state(name), "window": list(window[name]) if window else None}
    own = _to_host(own)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone: list[dict[str, Any]] | None = [{} for _ in range(size)] if rank == 0 else None
    dist.gather_object(own, everyone)
    return {name: state for states in everyone or () for name, state in states.items()}


def restore_states(factors: RunningFactors, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Give this rank's layers what a checkpoint has of them; layers that it does not know begin anew.

    Raises:
        ValueError: If a layer has other sizes.
    """
    for name in factors.layers:
        if name in states:
            factors.restore(name, states[name])


def restore_window(sums: WindowSums, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Give a window that has begun what it had had when it was saved; one rank of those with the same layers does."""
    for name in sums.layers:
        if name in states and states[name]["window"] is not None:
            sums.add(name, states[name]["window"])


def _to_host(value: Any) -> Any:
    """Copies of tensors in nested dictionaries and lists, in host memory."""
    if isinstance(value, dict):
        return {key: _to_host(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_to_host(inner) for inner in value]
    return torch.clone(value.detach()).cpu() if isinstance(value, Tensor) else value
