"""SIGTERM, and the signal by which SLURM asks for a requeue: all ranks act on them together, between two batches.

Lightning's own handlers communicate, wherever the signal finds the process. Ours set a flag. The flags travel with what
every step exchanges anyway, so all ranks hear of a signal to any of them at the end of the same batch.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_hybrid.compat import replace_signal_handlers, set_received_sigterm

FILE = "sigterm.ckpt"


class Signals:
    """Which signals this process has received, and on which the ranks have agreed.

    Attributes:
        agreed: All ranks leave after this batch.
        has_error: Says whether a save in the background has failed on this rank.
        save_failed: One has on some rank; all raise that before the next batch.
    """

    def __init__(self) -> None:
        self.agreed = self.save_failed = False
        self._terminate = self._requeue = self._requeue_agreed = False
        self._do_requeue: Callable[..., Any] | None = None
        self.has_error: Callable[[], bool] = bool

    def install(self, trainer: Trainer) -> None:
        """Take the place of Lightning's handlers; Lightning still registers, composes and restores them."""

        def terminate(number: int, frame: Any) -> None:
            self._terminate = True

        def requeue(number: int, frame: Any) -> None:
            self._requeue = True

        self._do_requeue = replace_signal_handlers(trainer, terminate, requeue)

    def wishes(self, trainer: Trainer) -> list[float]:
        """What this rank asks of all: to stop training, to leave at once, to save and requeue, to raise an error."""
        stop, failed = trainer.should_stop, self.has_error()
        return [float(wish) for wish in (stop, self._terminate, self._requeue, failed)]

    def grant(self, trainer: Trainer, wishes: Sequence[float]) -> None:
        """Do what any rank has asked for; every rank calls it with the sums of all ranks' wishes.

        Raises:
            SIGTERMException: On every rank, while predicting.
        """
        stop, terminate, requeue, failed = wishes
        self.save_failed |= failed > 0
        trainer.should_stop = stop > 0
        if terminate > 0 and not self.agreed:
            self.agreed = True
            rank_zero_info("SIGTERM: all ranks leave after this batch.")
            set_received_sigterm(trainer)  # Lightning raises SIGTERMException at the end of the batch
            if trainer.predicting:  # where it does not
                raise SIGTERMException
        if requeue > 0:
            self._requeue, self._requeue_agreed = False, True

    def warn_if_late(self) -> None:
        """Say that a signal came too late to act on."""
        if self._terminate and not self.agreed:
            warnings.warn("SIGTERM came after the last batch: the run has ended as if it had not.", stacklevel=2)

    def requeue_if_agreed(self) -> None:
        """Save and ask SLURM for a requeue, as Lightning does; every rank calls it between two batches."""
        if self._requeue_agreed and self._do_requeue is not None:
            self._requeue_agreed = False
            self._do_requeue(0, None)


def signals_of(trainer: Trainer) -> Signals:
    """Those of the Trainer's strategy."""
    strategy: Any = trainer.strategy
    signals: Signals = strategy.signals
    return signals


def save_after_sigterm(trainer: Trainer) -> None:
    """Save a checkpoint before all ranks leave a fit, unless a callback has done it or checkpointing is off."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    saves = any(isinstance(c, OnExceptionCheckpoint) or getattr(c, "save_on_exception", False) for c in callbacks)
    checkpoint = trainer.checkpoint_callback
    if saves or checkpoint is None or trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
        return
    path = os.path.join(getattr(checkpoint, "dirpath", None) or trainer.default_root_dir, FILE)
    trainer.save_checkpoint(path)
    rank_zero_info(f"SIGTERM: saved {path} at step {trainer.global_step}.")
