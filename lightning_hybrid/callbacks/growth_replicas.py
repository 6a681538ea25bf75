"""A batch that grows by more replicas: a run leaves with a checkpoint, and torchrun's agents start it on more nodes."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from math import gcd
from typing import Protocol, runtime_checkable

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_hybrid.callbacks.arguments import check_whole
from lightning_hybrid.callbacks.global_batch import num_replicas
from lightning_hybrid.functional.growth import nodes_to_add, usable_nodes
from lightning_hybrid.parallel.elastic import EXIT_FOR_MORE_REPLICAS, NODE, LeaveForMoreReplicas, Meeting, RunState

COMMAND = "lightning-hybrid elastic --dirpath {} --nnodes 1:4 --nproc-per-node 1 --rdzv-endpoint HOST:29400 SCRIPT"


@runtime_checkable
class _Writes(Protocol):
    """What a strategy has that writes checkpoints in the background."""

    def wait(self) -> None:
        """Wait until all are complete."""


class MoreReplicas:
    """Takes in nodes that wait, between two steps.

    Args:
        max_replicas: Most replicas.
        dirpath: Folder that all nodes share.

    Raises:
        ValueError: If the number is below 2, or there is no folder.
    """

    def __init__(self, max_replicas: int, dirpath: str | os.PathLike[str] | None) -> None:
        check_whole("max_replicas", max_replicas, 2)
        if dirpath is None:
            raise ValueError(
                f"max_replicas={max_replicas} needs dirpath: a folder that all nodes share, for the checkpoint with "
                "which a run leaves and is started again."
            )
        self.max_replicas, self._meeting = max_replicas, Meeting(dirpath)
        self._has_warned = False

    def check(self, trainer: Trainer) -> None:
        """Refuse a run that nobody would start again; call it in `setup`.

        Raises:
            ValueError: With the way out.
        """
        command = COMMAND.format(self._meeting.folder)
        if not dist.is_torchelastic_launched():
            raise ValueError(
                f"BatchSizeGrowth(max_replicas={self.max_replicas}): the run leaves to be started again with more "
                f"replicas, and nobody would. Start it by {command}, or leave max_replicas out."
            )
        if not _number("TORCHELASTIC_MAX_RESTARTS"):
            raise ValueError(
                f"BatchSizeGrowth(max_replicas={self.max_replicas}): torchrun has --max-restarts=0 and would not start "
                f"the run again. Give it a number of milestones and failures, or use {command}."
            )
        self._check_folder(trainer)
        self._step_aside()

    def _check_folder(self, trainer: Trainer) -> None:
        """Refuse a folder that not all ranks share, before some of them go on from its checkpoint and others begin."""
        mark, problem = "", ""
        if trainer.is_global_zero:
            try:
                mark = self._meeting.mark()
            except OSError as error:
                problem = f"rank 0 cannot write to it: {error}"
        mark, problem = trainer.strategy.broadcast((mark, problem))
        is_shared = trainer.strategy.reduce_boolean_decision((self._meeting.folder / mark).is_file(), all=True)
        if trainer.is_global_zero and mark:
            (self._meeting.folder / mark).unlink()
        if problem or not is_shared:
            raise ValueError(
                f"BatchSizeGrowth(dirpath={str(self._meeting.folder)!r}): "
                f"{problem or 'not all ranks see what rank 0 writes there'}. Give a folder that all nodes share."
            )

    def _step_aside(self) -> None:
        """Let nodes wait outside without which the others can share the batch, as after one of four is lost.

        Raises:
            LeaveForMoreReplicas: On all ranks, to be started again without these nodes.
        """
        state, present, rank = self._meeting.read(), _number("GROUP_WORLD_SIZE", 1), _number("GROUP_RANK")
        name = os.environ.get(NODE, "")
        if state is None or state.run != _run() or not state.batches or not name.endswith(f"-{os.getppid()}"):
            return
        usable = usable_nodes(state.batches, state.replicas, state.nodes, present)
        if usable in (0, present):
            return
        if rank >= usable and not _number("LOCAL_RANK"):
            self._meeting.wait_outside(name)
            os.kill(os.getppid(), signal.SIGTERM)  # the agent, whose launcher waits then
        rank_zero_info(f"BatchSizeGrowth: the batch cannot be shared by {present} nodes; {usable} go on.")
        raise LeaveForMoreReplicas

    def check_loaders(self, trainer: Trainer) -> None:
        """Refuse data that cannot go on with more replicas; in `on_train_start`.

        Raises:
            ValueError: If the data of a run cannot go on with more replicas.
        """
        for loader in CombinedLoader(trainer.train_dataloader, "sequential").flattened:
            if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
                raise ValueError(
                    f"BatchSizeGrowth(max_replicas={self.max_replicas}): {type(loader).__name__} keeps its own state, "
                    "of one replica, which cannot be shared out to more. Use a DataLoader without state_dict, or leave "
                    "max_replicas out."
                )

    def tell(self, trainer: Trainer, batches: Sequence[int], wanted: int) -> None:
        """Training begins, or a level of it: nobody is invited any more.

        Args:
            trainer: The Trainer.
            batches: Loader batches of one replica in a step of all, at the present level and at those to come.
            wanted: Replicas that the present level is to have.
        """
        if trainer.is_global_zero:
            before = self._meeting.read()
            self._meeting.go(before.invited if before is not None else ())
            self._meeting.write(self._state(trainer, "running", batches, wanted))

    def end(self, trainer: Trainer) -> None:
        """Training has ended, and waiting is in vain; in `on_train_end`."""
        if trainer.is_global_zero:
            self._meeting.write(self._state(trainer, "ended"))

    def on_exception(self, error: BaseException) -> None:
        """After SIGTERM, leave with an exit code by which agents start the run again.

        An agent that restarts its processes sends it; to the others a code of 0 would say that the run has ended.
        """
        if isinstance(error, SIGTERMException):
            error.code = EXIT_FOR_MORE_REPLICAS

    def take_in(self, trainer: Trainer, batches: Sequence[int], wanted: int) -> None:
        """Leave if nodes wait with which there would be more replicas, up to as many as are wanted.

        All ranks call it together, between two steps.

        Args:
            trainer: The Trainer.
            batches: Loader batches of one replica in a step of all, at the present level and at those to come.
            wanted: Replicas that the present level is to have.

        Raises:
            LeaveForMoreReplicas: On all ranks, once a checkpoint is complete.
        """
        replicas = num_replicas(trainer)
        if wanted <= replicas or not self._can_leave(trainer):
            return
        waiting = trainer.strategy.broadcast(self._meeting.waiting() if trainer.is_global_zero else [])
        added = nodes_to_add(batches, replicas, _number("GROUP_WORLD_SIZE", 1), wanted, len(waiting))
        if not added:
            return
        if not trainer.strategy.reduce_boolean_decision(_restarts_left() > 0, all=True):
            if not self._has_warned:
                rank_zero_warn(
                    "BatchSizeGrowth: nodes wait, and an agent of torchrun has no restarts left. The batch grows by "
                    "accumulation. Give a larger --max-restarts."
                )
            self._has_warned = True
            return
        self._leave(trainer, self._state(trainer, "leaving", batches, wanted, waiting[:added]))

    def _can_leave(self, trainer: Trainer) -> bool:
        """Whether the data could go on here with more replicas: anywhere in an epoch, or only where one begins."""
        return trainer.fit_loop.batch_idx < 0 or bool(getattr(trainer.strategy, "counts_samples", False))

    def _leave(self, trainer: Trainer, state: RunState) -> None:
        path = self._meeting.checkpoint
        trainer.save_checkpoint(path)
        writes = getattr(trainer.strategy, "checkpoints", None)
        if isinstance(writes, _Writes):
            writes.wait()
        trainer.strategy.barrier("a checkpoint to leave with")
        if trainer.is_global_zero:
            self._meeting.write(state)
        rank_zero_info(
            f"BatchSizeGrowth: saved {path} at step {trainer.global_step}; leaving, to start again on "
            f"{state.nodes} + {len(state.invited)} nodes (wanted: {state.wanted} replicas, now: {state.replicas})."
        )
        raise LeaveForMoreReplicas

    def _state(
        self, trainer: Trainer, what: str, batches: Sequence[int] = (), wanted: int = 0, invited: Sequence[str] = ()
    ) -> RunState:
        nodes = _number("GROUP_WORLD_SIZE", 1)
        return RunState(_run(), what, num_replicas(trainer), wanted, nodes, gcd(*batches), tuple(invited))


def _run() -> str:
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def _restarts_left() -> int:
    return _number("TORCHELASTIC_MAX_RESTARTS") - _number("TORCHELASTIC_RESTART_COUNT")


def _number(name: str, otherwise: int = 0) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else otherwise
