"""An accumulation window that a checkpoint is saved in, with its gradients, and that another run finishes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hybrid.parallel.checkpoint.parts import Parts
from lightning_hybrid.parallel.checkpoint.window import Reader, restore_window, window_parts
from lightning_hybrid.parallel.engine import Engine
from lightning_hybrid.strategies.losses import Turn, Window

PAIRS = "pairs"  # entry of the numbers: what routers and layers have counted


def kept_window(engine: Engine, window: Window) -> tuple[Parts, dict[str, Any]]:
    """What a checkpoint keeps of the window that goes on; every rank calls it between two batches.

    Returns:
        This rank's part of its gradients, by name; numbers, equal on all ranks. Both are empty where no window goes on.
    """
    parts = window_parts(engine)
    return parts, {**asdict(window), PAIRS: engine.balancing.window()} if engine.in_window else {}


class ResumedWindow:
    """The window that a checkpoint was saved in, until the first batch of the run that goes on is planned.

    Args:
        reader: Of the checkpoint's tensors.
        numbers: What `kept_window` has returned besides.
    """

    def __init__(self, reader: Reader, numbers: Mapping[str, Any]) -> None:
        self._reader, self._numbers = reader, numbers

    def restore(self, engine: Engine, window: Window, turn: Turn) -> None:
        """Go on with it; every rank calls it, when it is settled who has what.

        Args:
            engine: This rank's.
            window: What is known of it besides the gradients; changed in place.
            turn: Of the batch that comes.

        Raises:
            ValueError: If that is not the next batch of the window, or the model is another one.
        """
        if not self._numbers:
            if not turn.first:
                rank_zero_warn(
                    f"The checkpoint has no gradients of the first {turn.index} batch(es) of the accumulation window "
                    "it was saved in: another strategy has saved it, or a step had failed. The next step of the "
                    "optimizer is made of the other batches alone."
                )
            return
        saved = Window(**{name: number for name, number in self._numbers.items() if name != PAIRS})
        if saved.num_batches != turn.index:
            raise ValueError(
                f"The checkpoint has gradients of {saved.num_batches} batch(es) of an accumulation window that goes on "
                f"after {turn.index}: it was saved between a batch and its on_train_batch_end, or "
                "accumulate_grad_batches was another one. Resume with the Trainer that was used, or from another "
                "checkpoint."
            )
        restore_window(engine, self._reader, factor=saved.factor(turn))
        engine.balancing.resume_window(self._numbers.get(PAIRS, {}))
        vars(window).update(vars(saved))
