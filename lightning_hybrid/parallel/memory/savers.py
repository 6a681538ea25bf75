"""Which operation saves a tensor, and what its gradient reads of it, told by the functions of Python that are running.

Autograd does not say for whom it saves. A dispatch mode would know, and switches compilation off; a mode of torch
functions would make every attribute of every tensor slower, optimizers' too. `F.relu` and `F.max_pool2d`, which the
modules call, are functions of Python, so that a look at the stack is enough.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hybrid.compat import MAX_POOL
from lightning_hybrid.functional.pool_codecs import Window
from lightning_hybrid.parallel.ledgers.running import MODULE_CALL, variable
from lightning_hybrid.parallel.memory.hooks import ChainedHooks
from lightning_hybrid.parallel.memory.inputs import Arguments

Kind = Literal["relu", "pool", "argmax", "exact", "other"]
"""What a gradient reads: where the result of its operation, a ReLU, is positive; the shape of what its operation, a
max-pool, has got; places of maxima; exact numbers, where a forward is run again from them, in losses, and as statistics
of norms, of which one stands for many; numbers."""

_RELU, _POOLS = F.relu.__code__, (MAX_POOL, F.max_pool2d_with_indices.__code__)
_READ_SHAPES = ("cpu", "cuda")
"""Devices whose max-pools read the shape alone of what they had; others find the maxima again."""
_NORMS = {norm.__code__ for norm in (F.batch_norm, F.layer_norm, F.group_norm, F.instance_norm, F.rms_norm)}
_LOSSES = {
    code
    for name, function in vars(F).items()
    if "loss" in name or name in ("cross_entropy", "binary_cross_entropy", "kl_div", "log_softmax")
    if isinstance(code := getattr(function, "__code__", None), CodeType)
}
_ASKED, _ARGUMENTS = ChainedHooks.asked.__code__, Arguments.__init__.__code__
_OF_LOSSES, _OF_CHECKPOINTS = nn.L1Loss.__module__, "torch.utils.checkpoint"
_HOOKS = (  # modules of functions between an operation that saves and hooks
    "lightning_hybrid.parallel.memory.",
    "lightning_hybrid.parallel.ledgers.",
    "torch._dynamo.",
)


class Saver(NamedTuple):
    """An operation that saves a tensor.

    Attributes:
        kind: What its gradient reads.
        module: The innermost module that runs, if any does.
        window: Of a max-pool whose indices these are.
    """

    kind: Kind
    module: nn.Module | None = None
    window: Window | None = None


def saver_of(tensor: Tensor) -> Saver:
    """Who saves a tensor; call it while `ChainedHooks` ask about it."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _ASKED:
        frame = frame.f_back
    while frame is not None and _is_hook(frame):
        frame = frame.f_back
    kind, window = _role(frame, tensor)
    while frame is not None and frame.f_code is not MODULE_CALL:
        if kind == "other" and _needs_exact(frame):
            kind = "exact"
        frame = frame.f_back
    module: nn.Module | None = None if frame is None else variable(frame, "self")
    if kind == "other" and (module is None or any(base.__module__ == _OF_LOSSES for base in type(module).__mro__)):
        kind = "exact"
    return Saver(kind, module, window)


def _is_hook(frame: FrameType) -> bool:
    """Whether it stands between an operation that saves and the hooks."""
    return frame.f_globals.get("__name__", "").startswith(_HOOKS) and not _needs_exact(frame)


def _role(frame: FrameType | None, tensor: Tensor) -> tuple[Kind, Window | None]:
    """What the innermost function of Python does, whose own operations save."""
    if frame is not None and frame.f_code is _RELU:
        return "relu", None
    if frame is not None and frame.f_code in _NORMS and tensor.numel() < variable(frame, "input").numel():
        return "exact", None
    if frame is None or frame.f_code not in _POOLS:
        return "other", None
    if tensor.dtype is not torch.int64:
        return "pool" if tensor.device.type in _READ_SHAPES else "other", None
    given = {name: variable(frame, name) for name in ("kernel_size", "stride", "padding", "dilation", "input")}
    kernel = _pair(given["kernel_size"])
    stride = given["stride"]
    is_kernel = stride is None or (isinstance(stride, Sequence) and not stride)
    steps = kernel if is_kernel else _pair(stride)
    return "argmax", Window(kernel, steps, _pair(given["padding"]), _pair(given["dilation"]), given["input"].shape[-1])


def _needs_exact(frame: FrameType) -> bool:
    code = frame.f_code
    return code in _LOSSES or code is _ARGUMENTS or frame.f_globals.get("__name__") == _OF_CHECKPOINTS


def _pair(size: Any) -> tuple[int, int]:
    first, *rest = size if isinstance(size, Sequence) else (size,)
    return int(first), int(rest[0] if rest else first)
