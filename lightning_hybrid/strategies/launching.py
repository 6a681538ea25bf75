"""How processes start: what fits the environment that started them, and Lightning's launcher with an eye on errors."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Trainer
from typing_extensions import override

from lightning_hybrid.compat import SubprocessLauncher
from lightning_hybrid.parallel.mesh import Layout

PARENT = "LIGHTNING_HYBRID_PARENT"  # for the processes that rank 0 starts: its id
REFUSED = ("spawn", "fork", "notebook")


class Launcher(SubprocessLauncher):
    """Lightning's launcher that runs the script again for each process, or takes the processes that are there.

    Args:
        environment: Knows the ranks.
        num_processes: Processes of this node.
        num_nodes: Nodes.
        enter: Called before processes are started, with the Trainer.
        on_error: Called with the Trainer and an exception, before any hook hears of it; returns what is raised.
    """

    def __init__(
        self,
        environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        *,
        enter: Callable[[Trainer | None], None],
        on_error: Callable[[Trainer | None, BaseException], BaseException],
    ) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self._enter, self._on_error = enter, on_error

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        """Whether a notebook may use it: with one process, since a notebook cannot be run again for each."""
        return self.num_processes * self.num_nodes == 1

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        self._enter(trainer)
        starts = not self.cluster_environment.creates_processes_externally
        if starts:
            os.environ[PARENT] = str(os.getpid())

        def run() -> Any:
            if starts:
                os.environ.pop(PARENT, None)  # it is for the ranks, not for what this process starts later
            return function(*args, **kwargs)

        try:
            return super().launch(run)
        except BaseException as error:
            instead = self._on_error(trainer, error)
            if instead is error:
                raise
            raise instead from error


def launching_parent() -> int | None:
    """The process that must outlive this one: rank 0, where its launcher started this process; else None."""
    value = os.environ.get(PARENT, "")
    if not value.isdecimal() or os.environ.get("LOCAL_RANK", "0") == "0":
        return None
    return int(value) if os.getppid() == int(value) or not _is_alive(int(value)) else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def check_world(environment: ClusterEnvironment, devices: int, nodes: int, options: dict[str, Any]) -> None:
    """Check that the processes are as many as the Trainer says, and fill a layout, before any group is made.

    Args:
        environment: Knows the processes.
        devices: Of each node, as the Trainer has them.
        nodes: Nodes, as the Trainer has them.
        options: The strategy's keywords.

    Raises:
        ValueError: With the numbers and the way out.
    """
    wanted, asked = devices * nodes, f"Trainer(devices={devices}, num_nodes={nodes}) asks for {devices * nodes}"
    started, starter = _started(environment)
    if started not in (None, wanted):
        devices_too = f"devices={started // nodes}" if started % nodes == 0 else f"num_nodes={started // devices or 1}"
        raise ValueError(f"{starter} started {started} processes and {asked}. Set {devices_too}, or start {wanted}.")
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    if isinstance(environment, TorchElasticEnvironment) and here.isdecimal() and int(here) != devices:
        raise ValueError(f"torchrun started {here} processes on this node and devices={devices}. Set devices={here}.")
    if environment.local_rank() >= devices:
        raise ValueError(
            f"LOCAL_RANK={environment.local_rank()} and devices={devices}: local ranks count from 0 to {devices - 1}. "
            "Start as many processes as there are devices."
        )
    size = options.get("pipeline_parallel_size", 1)
    tensor, replicate = options.get("tensor_parallel_size", 1), options.get("replicate_size", 1)
    replicate = 1 if size == "auto" else replicate  # checked when the pipeline's size is known
    Layout.of_world(devices * nodes, pipeline=1 if size == "auto" else size, tensor=tensor, replicate=replicate)


def _started(environment: ClusterEnvironment) -> tuple[int | None, str]:
    """How many processes there are and who started them; None where Lightning itself starts them."""
    if dist.is_initialized():
        return dist.get_world_size(), "Whoever made the process group"
    if isinstance(environment, TorchElasticEnvironment):
        return environment.world_size(), "torchrun"
    if isinstance(environment, SLURMEnvironment):
        return environment.world_size(), "SLURM"
    if isinstance(environment, LightningEnvironment) or not environment.creates_processes_externally:
        return None, "Lightning"
    return environment.world_size(), type(environment).__name__


def refuse_launcher(kind: str) -> NoReturn:
    """Refuse processes that return one rank's weights only.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        f"strategy='hybrid_ptdp_{kind}': processes started by spawn or fork, as in notebooks, hand back the weights of "
        "rank 0 alone, which with a pipeline are one stage. Run a script with strategy='hybrid_ptdp', or torchrun."
    )
