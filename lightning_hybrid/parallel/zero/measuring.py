"""Backward passes between steps, whose gradients are their caller's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_hybrid.parallel.data_parallel import DataParallel
from lightning_hybrid.parallel.zero.sharding import Sharded


@contextmanager
def own_passes(data: DataParallel) -> Iterator[None]:
    """Context in which parameters are whole, and backward passes neither sum nor free; all replicas enter it together.

    A step says anew what its passes do. Gradients are to be asked for, not left in parameters.
    """
    with data.whole():
        for module in data.modules if isinstance(data, Sharded) else ():
            module.set_requires_gradient_sync(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)
            module.set_is_last_backward(True)  # the order of forward passes is forgotten behind each
        yield
