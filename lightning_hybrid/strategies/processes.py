"""Processes of a strategy: launcher, ranks, the default process group, and what Lightning asks all ranks together."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightning_hybrid.parallel.elastic import LeaveForMoreReplicas
from lightning_hybrid.parallel.failures.hub import Hub
from lightning_hybrid.parallel.failures.watch import Watch, end_process
from lightning_hybrid.parallel.tensor.parallel import whole_tree
from lightning_hybrid.strategies.checks import check_before_launch
from lightning_hybrid.strategies.failures import Saving, judge
from lightning_hybrid.strategies.files import WholeFiles
from lightning_hybrid.strategies.launching import Launcher, check_world, launching_parent
from lightning_hybrid.strategies.reductions import reduce_over_data
from lightning_hybrid.strategies.signals import Signals, save_after_sigterm

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
        self.options: dict[str, Any] = {}
        self.signals = Signals()
        self._watch: Watch | None = None
        self._hub: Hub | None = None
        self._saving: Saving | None = None

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
        self._launcher = Launcher(
            self.cluster_environment, self.num_processes, self.num_nodes, enter=self._enter, on_error=self._on_error
        )

    def _enter(self, trainer: Trainer | None) -> None:
        """Before any process is started: check how many there will be, and take care of signals."""
        assert self.cluster_environment is not None
        check_world(self.cluster_environment, self.num_processes, self.num_nodes, self.options)
        if trainer is not None and self.num_nodes * self.num_processes > 1:
            check_before_launch(trainer, self.options)
        if trainer is not None and self.num_nodes * self.num_processes > 1:
            self.signals = Signals()
            self.signals.install(trainer)

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
        environment = self.cluster_environment
        assert environment is not None
        if type(self.checkpoint_io) is TorchCheckpointIO:
            self.checkpoint_io = WholeFiles()
        if environment.world_size() > 1:
            self._watch = Watch(environment.global_rank(), parent=launching_parent(), end=self._end)
        start_process_group(environment, self.root_device, self.process_group_backend, self.timeout)
        if self._watch is not None:
            self._hub = Hub(environment.world_size(), environment.main_address) if self.is_global_zero else None
            address = self.broadcast(self._hub.address if self._hub is not None else None)
            assert address is not None
            self._watch.join(address)

    def leave(self) -> None:
        """Stop watching the other ranks; what they and this process do from now on is no failure."""
        if self._saving is not None:
            self._saving.release()
        else:
            self.signals.warn_if_late()
        if self._watch is not None:
            self._watch.stop()
        if self._hub is not None:
            self._hub.stop()
        self._saving = self._watch = self._hub = None

    def _on_error(self, trainer: Trainer | None, error: BaseException) -> BaseException:
        """Before the hooks for exceptions, some of which would save: who failed first, and can all ranks save?"""
        if isinstance(error, SIGTERMException) and self.signals.agreed:
            self.on_validation_end()  # if that is where it found us, what evaluation has gathered is let go
            return error
        if isinstance(error, LeaveForMoreReplicas):  # all ranks do, after a checkpoint
            self._saving = Saving(trainer, lambda: "one has been saved.") if trainer is not None else None
            return error
        if self._watch is None or trainer is None:  # the other ranks have not met this one
            assert isinstance(self._launcher, Launcher)
            self._launcher.kill(signal.SIGKILL)
            return error
        instead, reason = judge(self._watch, trainer, error)
        self._saving = Saving(trainer, reason)
        return instead

    @override
    def on_exception(self, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException) and (self.signals.agreed or self.world_size == 1):
            assert self.lightning_module is not None
            save_after_sigterm(self.lightning_module.trainer)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.signals.requeue_if_agreed()

    def _end(self, text: str) -> None:
        end_process(text, [process.pid for process in getattr(self._launcher, "procs", ())])

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the ranks that see different data, or over `group`."""
        return reduce_over_data(whole_tree(tensor), group or self.data_group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather from the ranks that see different data, or from `group`; Lightning's default is the world."""
        group = self.data_group if group in (None, dist.group.WORLD) else group
        tensor = whole_tree(tensor)
        if sync_grads or not dist.is_initialized():
            return super().all_gather(tensor, group=group, sync_grads=sync_grads)
        parts = [
            torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))
        ]
        dist.all_gather(parts, tensor.detach().contiguous(), group=group)
        return torch.stack(parts)

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
