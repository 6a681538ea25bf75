"""What `predict_step` returns, joined over micro-batches and replicas: each sample once, in the order of the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor

from lightning_hybrid.functional.joining import interleave, join
from lightning_hybrid.functional.trees import map_leaves
from lightning_hybrid.parallel.mesh import Mesh


@dataclass
class Share:
    """One replica's part of a batch of predictions.

    Attributes:
        value: What its micro-batches returned, joined, in host memory; or the error that says why it cannot be.
        samples: Number of samples.
        indices: Their numbers in the dataset, where the loader tells.
    """

    value: Any
    samples: int
    indices: list[int] | None


def gather_predictions(mesh: Mesh, share: Share | None) -> tuple[Any, list[int] | None]:
    """Predictions of all replicas for one batch on every rank; all ranks call it together.

    Args:
        mesh: Groups of this rank.
        share: On the last stage, what the replica has predicted; None elsewhere, or where it has no more data.

    Returns:
        The predictions in the order in which one process sees the data, since replicas are dealt samples in turn; and
        the numbers of their samples in the dataset, if the loaders tell them.

    Raises:
        ValueError: On every rank, if the parts cannot be joined.
    """
    shares: list[Share] = []
    for data_rank in range(mesh.layout.data):
        box = [share]
        if mesh.layout.world_size > 1:
            last_stage = mesh.layout.rank(mesh.layout.pipeline - 1, data_rank)
            dist.broadcast_object_list(box, src=last_stage)
        if box[0] is not None:
            shares.append(box[0])
    for part in shares:
        if isinstance(part.value, ValueError):  # on every rank, so that none waits for another
            raise part.value
    sizes = [part.samples for part in shares]
    value = join([part.value for part in shares], sizes) if shares else None
    indices = _all_indices(shares)
    if len(shares) > 1:
        value, indices = interleave(value, sizes), indices and interleave(indices, sizes)
    return map_leaves(_on(mesh.device), value), indices


def share_of(outputs: Sequence[Any], sizes: Sequence[int], indices: list[int] | None) -> Share:
    """This replica's share, from what its micro-batches of the given sizes returned."""
    try:
        value = join(outputs, sizes)
    except ValueError as error:
        return Share(error, 0, None)
    return Share(map_leaves(_on(torch.device("cpu")), value), sum(sizes), indices)


def tell_writers(trainer: Trainer, indices: list[int] | None, loader: int) -> None:
    """Let `BasePredictionWriter` know which samples of the dataset the predictions are of."""
    loop: Any = trainer.predict_loop
    loop.current_batch_indices = indices
    if loop.epoch_batch_indices[loader]:
        loop.epoch_batch_indices[loader][-1] = indices


class WritersOfRankZero:
    """Keeps prediction writers silent on all ranks but the first, which is given everything."""

    def __init__(self) -> None:
        self._silenced: list[Callback] = []

    def silence(self, trainer: Trainer) -> None:
        """Silence them, unless this is rank 0."""
        for callback in trainer.callbacks if trainer.global_rank else []:  # type: ignore[attr-defined]
            if isinstance(callback, BasePredictionWriter):
                vars(callback).update(on_predict_batch_end=_nothing, on_predict_epoch_end=_nothing)
                self._silenced.append(callback)

    def restore(self) -> None:
        """Give the writers their voice back."""
        for callback in self._silenced:
            for hook in ("on_predict_batch_end", "on_predict_epoch_end"):
                vars(callback).pop(hook, None)
        self._silenced.clear()


def _all_indices(shares: Sequence[Share]) -> list[int] | None:
    known = [share.indices for share in shares if share.indices is not None and len(share.indices) == share.samples]
    return [index for indices in known for index in indices] if shares and len(known) == len(shares) else None


def _on(device: torch.device) -> Any:
    return lambda leaf: leaf.detach().to(device) if isinstance(leaf, Tensor) else leaf


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Rank 0 writes."""
