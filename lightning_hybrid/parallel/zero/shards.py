"""One rank's shard of a tensor that it has whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_hybrid.optim.base import as_state, collapse, collapse_placements


def shard_like(
    value: Any, like: Any, device: torch.device | None = None, *, collapsed: frozenset[int] = frozenset()
) -> Any:
    """This rank's shard of a whole tensor that has the shape of a sharded one; anything else as it is.

    Every rank has the whole tensor, so that nothing is sent. The shard does not keep the whole alive.

    Args:
        value: The whole.
        like: The sharded one.
        device: Where the shard is to be; None for where the sharded one is.
        collapsed: Dimensions of the sharded one that have length 1 in the whole.
    """
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if tuple(value.shape) != collapse(like.shape, collapsed):
        return value
    placements = collapse_placements(like.placements, collapsed)
    part = distribute_tensor(value, like.device_mesh, placements, src_data_rank=None).to_local()  # in own memory
    part = part.to(device or like.device)  # shards may live in host memory, beside the mesh's device
    return as_state(part, like, collapsed)
