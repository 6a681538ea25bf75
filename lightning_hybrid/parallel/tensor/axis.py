"""The tensor axis of one rank: its group, and the collectives that autograd goes through.

The functions are those of Shoeybi et al. 2019 (arXiv:1909.08053, section 3) and Korthikanti et al. 2022
(arXiv:2205.05198, section 4.2). A plain tensor on every rank stands for one whole value, and so does its gradient; a part
stands for itself, and its gradient is that of the part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


class TensorAxis:
    """The ranks that share the matrices of one model.

    Attributes:
        group: Their process group.
        rank: This one's position.
        size: How many they are.
        active: A step is under way: modules show split parameters as `SplitTensor`s, and outside it as they are.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.active = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of a step."""
        before, self.active = self.active, True
        try:
            yield
        finally:
            self.active = before
