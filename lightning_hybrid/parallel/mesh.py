"""Which rank holds which coordinates, and one process group for each thing that ranks do together.

`torch.distributed.DeviceMesh` was considered for the groups: it makes one communicator an axis, while a pipeline needs
two for each boundary between ranks, one a direction. NCCL runs all that one communicator does in one stream, in order,
whoever the peers are; with a communicator for each direction between two ranks, no transfer waits for unrelated ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes; ranks count the pipeline axis slowest and the tensor axis fastest.

    Attributes:
        pipeline: Size of the pipeline axis.
        data: Size of the data axis.
        tensor: Size of the tensor axis.
        replicate: Groups on the data axis that each hold all shards; slower than the ranks within a group.
        expert: Neighbours on the data axis over which experts are split; every rank of such a group sees other samples.
    """

    pipeline: int
    data: int
    tensor: int = 1
    replicate: int = 1
    expert: int = 1

    @classmethod
    def of_world(
        cls, world_size: int, *, pipeline: int, tensor: int = 1, replicate: int = 1, expert: int = 1
    ) -> Layout:
        """The layout that fills `world_size` processes.

        Raises:
            ValueError: If `world_size` is not a multiple of pipeline times tensor, the data axis not of `replicate`, or
                a copy of the shards not of `expert`.
        """
        model = pipeline * tensor
        if world_size % model:
            raise ValueError(
                f"world_size={world_size} is not a multiple of pipeline_parallel_size={pipeline} * "
                f"tensor_parallel_size={tensor} = {model}. Start {model * max(1, world_size // model)} processes, or "
                "lower one of the two sizes."
            )
        data = world_size // model
        if data % replicate:
            raise ValueError(
                f"replicate_size={replicate} does not divide the data axis: {world_size} processes are {data} replicas "
                f"of {model}. Choose a divisor of {data}."
            )
        if data // replicate % expert:
            copies = (
                f", and replicate_size={replicate} leaves {data // replicate} in each copy" if replicate > 1 else ""
            )
            pipelined = ", or give pipeline_parallel_size=1" if pipeline > 1 else ""
            raise ValueError(
                f"expert_parallel_size={expert} does not divide the data axis: {world_size} processes with "
                f"pipeline_parallel_size={pipeline} and tensor_parallel_size={tensor} are {data} replicas{copies}. "
                f"Choose a divisor of {data // replicate}{pipelined}."
            )
        return cls(pipeline, data, tensor, replicate, expert)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.pipeline * self.data * self.tensor

    @property
    def replica(self) -> int:
        """Number of processes that hold one copy of the model together, and see the same samples."""
        return self.pipeline * self.tensor

    @property
    def shard(self) -> int:
        """Number of ranks on the data axis over which one copy of the sharded states is spread."""
        return self.data // self.replicate

    def rank(self, pipeline: int, data: int, tensor: int = 0) -> int:
        """World rank at these coordinates."""
        return (pipeline * self.data + data) * self.tensor + tensor

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(pipeline, data, tensor) rank of a world rank."""
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return pipeline, data, tensor


@dataclass(frozen=True)
class Peers:
    """Ranks that hold the same stages of something, whole or each a shard, and see different samples.

    Attributes:
        group: They.
        replicate: Copies that they hold of all shards.
        device_mesh: Makes what torch's own functions take: one dimension of shards, or copies by shards.
    """

    group: dist.ProcessGroup
    replicate: int
    device_mesh: Callable[[], DeviceMesh]

    @property
    def size(self) -> int:
        """How many."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """This rank among them."""
        return self.group.rank()

    @property
    def copy(self) -> int:
        """Which of the copies this rank has a shard of."""
        return self.rank // (self.size // self.replicate)


class Mesh:
    """The groups of one rank. Made by all ranks together; the default group must exist.

    Attributes:
        pipeline_group: Ranks of one replica at this tensor rank, in pipeline order.
        data_group: Ranks that hold the same stages and see different samples.
        tensor_group: Ranks that hold slices of the same matrices, in tensor order; they see the same samples.
        expert_group: Neighbours on the data axis that together hold all experts, in the experts' order.
        experts: Who has the same experts as this rank; `dense` where experts are not split.
        dense: Who has the same of everything else: the data axis.
        channels: For (forward, lower rank), the two pipeline ranks on both sides of a boundary; the last rank's upper
            neighbour is the first. Only those of this rank's own boundaries.
    """

    def __init__(self, layout: Layout, *, device: torch.device, timeout: timedelta | None = None) -> None:
        if dist.get_world_size() != layout.world_size:
            raise ValueError(
                f"The layout {layout} needs {layout.world_size} processes, there are {dist.get_world_size()}."
            )
        self.layout, self.device, self.timeout = layout, device, timeout
        self.rank = dist.get_rank()
        self.pipeline_rank, self.data_rank, self.tensor_rank = layout.coordinates(self.rank)
        pipelines = [
            [layout.rank(p, d, t) for p in range(layout.pipeline)]
            for d in range(layout.data)
            for t in range(layout.tensor)
        ]
        datas = [
            [layout.rank(p, d, t) for d in range(layout.data)]
            for p in range(layout.pipeline)
            for t in range(layout.tensor)
        ]
        tensors = [
            [layout.rank(p, d, t) for t in range(layout.tensor)]
            for p in range(layout.pipeline)
            for d in range(layout.data)
        ]
        self.pipeline_ranks, self.data_ranks, self.tensor_ranks = (
            next(ranks for ranks in partition if self.rank in ranks) for partition in (pipelines, datas, tensors)
        )
        self.pipeline_group = self.group(pipelines, "pipeline")
        self.data_group = self.group(datas, "data")
        self.tensor_group = self.group(tensors, "tensor")
        self.dense = self._peers(datas, layout.replicate, "data")
        self.expert_rank = self.data_rank % layout.expert
        self.experts, self.expert_group = self._experts(datas)
        self.channels: dict[tuple[bool, int], dist.ProcessGroup] = {}
        for lower in range(layout.pipeline if layout.pipeline > 1 else 0):
            pairs = [[ranks[lower], ranks[(lower + 1) % layout.pipeline]] for ranks in pipelines]
            for forward in (True, False):
                group = self._group_of(pairs, f"pipeline {'forward' if forward else 'backward'}")
                if group is not None:
                    self.channels[forward, lower] = group

    @property
    def is_last(self) -> bool:
        """Whether this rank owns the last stage."""
        return self.pipeline_rank == self.layout.pipeline - 1

    def group(self, partition: Iterable[list[int]], name: str = "other") -> dist.ProcessGroup:
        """This rank's group out of a partition of the world. Every rank must call it with the same partition.

        The name becomes the group's description: its axis, which traffic is counted by, and maybe a direction.
        """
        mine = self._group_of(partition, name)
        assert mine is not None, "a partition covers every rank"
        return mine

    def _experts(self, datas: list[list[int]]) -> tuple[Peers, dist.ProcessGroup | None]:
        """Who has the same experts, and who has the others."""
        size = self.layout.expert
        if size == 1:
            return self.dense, None
        same = [ranks[i::size] for ranks in datas for i in range(size)]
        together = [ranks[i : i + size] for ranks in datas for i in range(0, len(ranks), size)]
        replicate = self.layout.replicate if self.layout.shard > 1 else self.layout.replicate // size
        return self._peers(same, replicate, "data experts"), self.group(together, "expert")

    def _peers(self, partition: list[list[int]], replicate: int, name: str) -> Peers:
        """This rank's of a partition of the world, each part of which holds `replicate` copies of something."""
        mine = next(ranks for ranks in partition if self.rank in ranks)
        group = self.data_group if mine == self.data_ranks else self.group(partition, name)
        kind, size = self.device.type, len(mine) // replicate
        if replicate == 1:
            return Peers(group, 1, lambda: DeviceMesh.from_group(group, kind, mesh_dim_names=("shard",)))
        shards = [ranks[i : i + size] for ranks in partition for i in range(0, len(ranks), size)]
        copies = [ranks[i::size] for ranks in partition for i in range(size)]
        groups = [self.group(copies, f"{name} replicate"), self.group(shards, f"{name} shard")]
        ranks = torch.tensor(mine).view(replicate, -1)
        return Peers(
            group,
            replicate,
            lambda: DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=("replicate", "shard")),
        )

    def _group_of(self, disjoint: Iterable[list[int]], name: str) -> dist.ProcessGroup | None:
        mine = None
        for ranks in disjoint:  # every rank makes every group, in the same order
            group = dist.new_group(ranks, timeout=self.timeout, group_desc=name)
            if self.rank in ranks:
                mine = group
        return mine

    def rank_of_stage(self, stage: int) -> int:
        """World rank in this replica that owns a (global) stage."""
        return self.pipeline_ranks[stage % self.layout.pipeline]
