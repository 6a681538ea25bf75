"""What torch functions do not see, and what would take a part for a whole: it changes while a step runs.

`torch.autograd.Function`s, full backward hooks and reentrant checkpoints among them, and `vmap`, get whole tensors.
Code of the user's that goes over the parameters of a module, for a penalty on weights or to clip by hand, is shown
what the modules show.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction

from lightning_hybrid.compat import before_vmap, replaced
from lightning_hybrid.functional.trees import leaves_of, map_leaves
from lightning_hybrid.parallel.tensor.split_tensor import SplitTensor, warn_of_gather, whole

_apply = vars(Function)["apply"].__func__
_named_parameters = nn.Module.named_parameters
LIBRARIES = ("torch", "lightning", "lightning_hybrid")  # they know what they want with the parameters themselves


@contextmanager
def step_surroundings() -> Iterator[None]:
    """Context of a step."""
    with (
        replaced(Function, "apply", classmethod(_applied)),
        replaced(nn.Module, "named_parameters", _named),
        replaced(nn.Module, "parameters", _unnamed),
        before_vmap(_wholes),
    ):
        yield


def _named(
    module: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, Any]]:
    found = _named_parameters(module, prefix, recurse, remove_duplicate)
    return found if _asked_by_library() else _as_shown(module, prefix, found)


def _unnamed(module: nn.Module, recurse: bool = True) -> Iterator[Any]:
    found = _named_parameters(module, "", recurse)
    return (parameter for _, parameter in (found if _asked_by_library() else _as_shown(module, "", found)))


def _as_shown(module: nn.Module, prefix: str, found: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, _ in found:
        parent, _, leaf = name.removeprefix(f"{prefix}." if prefix else "").rpartition(".")
        yield name, getattr(module.get_submodule(parent), leaf)


def _asked_by_library() -> bool:
    """Whether the function that wants to go over parameters is torch's, Lightning's or ours."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in LIBRARIES


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
