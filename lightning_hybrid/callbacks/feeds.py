"""What a training loop draws its batches from, in the place of Lightning's fetcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

Item = tuple[Any, int, int]
"""A batch, its number, and the number of its loader, as Lightning's fetcher gives them."""


class Recorder:
    """Passes on what another feed gives, and tells of it.

    Args:
        feed: Lightning's fetcher, or another feed.
        tell: Is told each item before the loop has it.
    """

    def __init__(self, feed: Any, tell: Callable[[Item], object]) -> None:
        self._feed, self._tell = feed, tell

    @property
    def done(self) -> bool:
        """Whether the batch given last is the epoch's last."""
        return bool(self._feed.done)

    def __next__(self) -> Item:
        item: Item = next(self._feed)
        self._tell(item)
        return item


class Replay:
    """Gives items that have been kept; more come after them.

    Args:
        items: In order.
    """

    done = False

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = iter(items)

    def __next__(self) -> Item:
        return next(self._items)


def refuse_own_fetching(pl_module: LightningModule, name: str) -> None:
    """Refuse a step that takes `dataloader_iter`, with batches that nobody else sees.

    Args:
        pl_module: The model.
        name: Of the callback, for the error.

    Raises:
        ValueError: Naming the argument.
    """
    if is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            f"{name} changes which batches a step gets, and {type(pl_module).__name__}.training_step fetches its own "
            f"by dataloader_iter. Take (batch, batch_idx) instead, or remove {name}."
        )
