"""What torch's Python interface does not see gets whole tensors: `torch.autograd.Function`s, and `vmap`.

Full backward hooks and reentrant checkpoints are such functions too. They would take a part for a whole, silently.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction

from lightning_hybrid.compat import before_vmap, replaced
from lightning_hybrid.functional.trees import leaves_of, map_leaves
from lightning_hybrid.parallel.tensor.split_tensor import SplitTensor, warn_of_gather, whole

_apply = vars(Function)["apply"].__func__


@contextmanager
def whole_arguments() -> Iterator[None]:
    """Context in which such functions are given whole tensors."""
    with replaced(Function, "apply", classmethod(_applied)), before_vmap(_wholes):
        yield


def _wholes(tree: Any) -> Any:
    if any(isinstance(leaf, SplitTensor) for leaf in leaves_of(tree)):
        warn_of_gather("vmap", tree, {})
    return map_leaves(whole, tree)


def _applied(kind: type[Function], *args: Any, **kwargs: Any) -> Any:
    if kind.__module__.startswith("lightning_hybrid."):
        return _apply(kind, *args, **kwargs)
    if any(isinstance(leaf, SplitTensor) for leaf in (*args, *kwargs.values())):
        warn_of_gather(kind.__name__, args, kwargs)
        args, kwargs = map_leaves(whole, (args, kwargs))
    if kind is CheckpointFunction:  # its backward pairs results with their gradients
        function, *rest = args
        args = (lambda *inputs: map_leaves(whole, function(*inputs)), *rest)
    return _apply(kind, *args, **kwargs)
