"""16-bit copies in the place of float32 parameters, before `fully_shard` makes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lightning_hybrid.parallel.zero.units import loose_parameters


@contextmanager
def shown_as(root: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Context in which float32 parameters hold copies of another type; afterwards they are themselves again.

    It shows what `Sharded` with that `param_dtype` shows.
    """
    loose = set(loose_parameters(root, torch.float32).values())
    masters = [(p, p.data) for p in root.parameters() if p.dtype == torch.float32 and p not in loose]
    for parameter, master in masters:
        parameter.data = master.to(dtype)
    try:
        yield
    finally:
        for parameter, master in masters:
            parameter.data = master
