"""Starts the default process group."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment


def start_process_group(
    environment: ClusterEnvironment, device: torch.device, backend: str | None, timeout: timedelta | None
) -> None:
    """Make the default group of all processes, unless somebody has made it.

    Args:
        environment: Knows the ranks and where rank 0 listens.
        device: Where this rank computes.
        backend: Name of a backend; None takes torch's default for the device.
        timeout: Longest wait of a collective; None takes torch's default.
    """
    if dist.is_initialized():
        return
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
    backend = backend or dist.Backend.default_device_backend_map.get(device.type, "gloo")
    dist.init_process_group(
        backend,
        rank=environment.global_rank(),
        world_size=environment.world_size(),
        timeout=timeout,
        device_id=device if device.type != "cpu" else None,
    )
