"""What a checkpoint keeps beside Lightning's own state, so that training goes on as if it had never stopped.

The base of all seeds, the random streams and the loaders' states of every replica, and the names of the optimizers'
parameters. Stock Lightning ignores the entry; a checkpoint without it resumes too, from fresh random streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from lightning_hybrid.parallel.mesh import Layout, Mesh
from lightning_hybrid.parallel.streams import random_state, set_random_state
from lightning_hybrid.strategies.positions import Place

ENTRY = "lightning_hybrid"
LOADERS = "combined_loader"  # where Lightning's fit loop keeps the states of stateful loaders


def optimizer_names(checkpoint: Mapping[str, Any], number: int) -> list[Any]:
    """For each saved optimizer, the names of the parameters of each of its groups; None where nobody noted them."""
    names: list[Any] = checkpoint.get(ENTRY, {}).get("optimizer_parameters", [None] * number)
    return names


def add_state(
    checkpoint: dict[str, Any], mesh: Mesh, *, seed: int, names: list[list[list[str]]], data: dict[str, Any]
) -> None:
    """Complete a checkpoint of all states on rank 0; every rank must call it.

    Args:
        checkpoint: Lightning's, with what this rank's loops and loaders say.
        mesh: Groups of this rank.
        seed: Base of all seeds.
        names: For each optimizer and group, parameters over the whole model.
        data: What `DataLoaders.training_state` says of this replica.
    """
    if "optimizer_states" not in checkpoint:
        return
    mine = {"random": random_state(mesh.device), **data, "loaders": _fit_loop(checkpoint).get(LOADERS, [])}
    if mesh.pipeline_rank > 0 or mesh.tensor_rank > 0:
        mine = {"random": mine["random"]}
    ranks: list[Any] = [None] * mesh.layout.world_size
    dist.all_gather_object(ranks, mine)
    layout = mesh.layout
    checkpoint[ENTRY] = {
        "seed": seed,
        "layout": {"pipeline": layout.pipeline, "data": layout.data, "tensor": layout.tensor},
        "random": [each.pop("random") for each in ranks],
        "replicas": [ranks[layout.rank(0, replica)] for replica in range(layout.data)],
        "optimizer_parameters": names,
    }


def random_of(entry: Mapping[str, Any], mesh: Mesh) -> Any:
    """The saved random streams of this rank's place in the layout, or of its replica's first rank, or None."""
    place = (mesh.pipeline_rank, mesh.data_rank, mesh.tensor_rank)
    if "random" not in entry:  # written before each rank's streams were kept
        replicas = entry["replicas"]
        return replicas[place[1]]["random"] if place[1] < len(replicas) else None
    layout = Layout(**entry["layout"])
    if place[1] >= layout.data:
        return None
    known = place[0] < layout.pipeline and place[2] < layout.tensor
    return entry["random"][layout.rank(*place) if known else layout.rank(0, place[1])]


class Resuming:
    """Takes such an entry up again: each part at the moment at which training needs it."""

    def __init__(self) -> None:
        self._checkpoint: dict[str, Any] = {}
        self._random: dict[str, Any] | None = None
        self._mid_epoch = False

    @property
    def seed(self) -> int | None:
        """The base of all seeds of the run that goes on; None for a new one."""
        seed: int | None = self._checkpoint.get(ENTRY, {}).get("seed")
        return seed

    def remember(self, checkpoint: dict[str, Any]) -> None:
        """Keep a checkpoint that Lightning has loaded, until the groups exist."""
        self._checkpoint = checkpoint

    def prepare(self, mesh: Mesh) -> Place:
        """Give Lightning the loaders' states of this rank's replica instead of the first one's.

        Returns:
            Where the replica was in its training data.

        Raises:
            RuntimeError: If stateful loaders stopped in the middle of an epoch and their number was another one.
        """
        checkpoint, self._checkpoint = self._checkpoint, {}
        entry = checkpoint.get(ENTRY)
        if entry is None:
            return Place()
        replicas, layout = entry["replicas"], mesh.layout
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        self._mid_epoch = not progress["is_last_batch"]
        self._random = random_of(entry, mesh)
        if len(replicas) == layout.data:
            if replicas[mesh.data_rank]["loaders"]:
                _fit_loop(checkpoint)[LOADERS] = replicas[mesh.data_rank]["loaders"]
        elif any(replica["loaders"] for replica in replicas):
            if self._mid_epoch:
                raise RuntimeError(
                    f"The checkpoint was saved in the middle of an epoch with stateful loaders of {len(replicas)} "
                    f"replica(s), and now there are {layout.data}: their states cannot be shared out anew. Resume with "
                    f"a data parallel size of {len(replicas)}, or from a checkpoint of the end of an epoch."
                )
            _fit_loop(checkpoint).pop(LOADERS, None)
        return self._place(replicas, mesh)

    def _place(self, replicas: list[dict[str, Any]], mesh: Mesh) -> Place:
        """A replica that the checkpoint does not know goes on as the first, with its generators if all had the same."""
        is_known, were_same = mesh.data_rank < len(replicas), _same_generators(replicas)
        own = replicas[mesh.data_rank if is_known else 0]
        return Place(
            own.get("generators", []) if is_known or were_same else [],
            own.get("positions", []),
            own.get("accumulate", 1),
            self._mid_epoch,
        )

    def restore_random(self, mesh: Mesh, *, in_epoch: bool) -> None:
        """Set the random streams, before the loaders are read (`in_epoch` False) or before the first batch is fetched.

        Between epochs an uninterrupted run draws the order of the next one; in the middle of one it has drawn it.
        """
        if self._random is not None and in_epoch == self._mid_epoch:
            set_random_state(self._random, mesh.device)
            self._random = None


def _same_generators(replicas: list[dict[str, Any]]) -> bool:
    """Whether all replicas had drawn the same from the generators of their loaders."""
    states = [replica.get("generators", []) for replica in replicas]
    return all(len(each) == len(states[0]) and all(map(torch.equal, each, states[0])) for each in states)


def _fit_loop(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = checkpoint["loops"]["fit_loop"]["state_dict"]
    return state
