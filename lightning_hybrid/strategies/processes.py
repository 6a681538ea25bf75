"""Processes of a strategy: launcher, ranks, the default process group, and what Lightning asks all ranks together."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightning_hybrid.compat import subprocess_launcher
from lightning_hybrid.strategies.reductions import reduce_over_data

DEFAULT_TIMEOUT = timedelta(minutes=30)


class ProcessStrategy(ParallelStrategy):
    """One process a device, started by Lightning's launcher, torchrun or a cluster.

    Args:
        process_group_backend: Backend of the default process group; None chooses by device.
        timeout: Longest wait of a collective; None takes torch's default.
    """

    def __init__(self, process_group_backend: str | None, timeout: timedelta | None) -> None:
        super().__init__()
        self.process_group_backend, self.timeout = process_group_backend, timeout
        self.num_nodes = 1

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that see different data; None for all."""
        return None

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = subprocess_launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tell the environment and the loggers of this process which rank it is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
            vars(rank_zero_only)["rank"] = self.cluster_environment.global_rank()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        start_process_group(self.cluster_environment, self.root_device, self.process_group_backend, self.timeout)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the ranks that see different data, or over `group`."""
        return reduce_over_data(tensor, group or self.data_group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather from the ranks that see different data, or from `group`."""
        return super().all_gather(tensor, group=group or self.data_group, sync_grads=sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks of the world (or any) say so."""
        operation = dist.ReduceOp.MIN if all else dist.ReduceOp.MAX
        return bool(reduce_over_data(torch.tensor(int(decision), device=self.root_device), None, operation))

    @override
    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized():
            dist.barrier()

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        if not dist.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]


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
