"""Which pass a forward call of a module belongs to, where an activation checkpoint may run it twice."""

from __future__ import annotations

import inspect
from enum import Enum, auto

import torch
from torch.autograd.function import FunctionCtx

from lightning_hybrid.compat import in_backward
from lightning_hybrid.parallel.ledgers.running import variable


class Pass(Enum):
    """Of a call in training mode.

    FORWARD has gradients. AHEAD has none, and is repeated with them: a reentrant activation checkpoint, of torch or of
    anybody who runs modules inside a `torch.autograd.Function`. RECOMPUTED is the repetition by a checkpoint of either
    kind. OTHER is user's code under `torch.no_grad()`, and what checkpoints in checkpoints do in between.
    """

    FORWARD = auto()
    AHEAD = auto()
    RECOMPUTED = auto()
    OTHER = auto()


def current_pass() -> Pass:
    """The pass that calls this."""
    if torch.is_grad_enabled():
        return Pass.RECOMPUTED if in_backward() else Pass.FORWARD
    return Pass.AHEAD if not in_backward() and _in_function() else Pass.OTHER


def _in_function() -> bool:
    """Whether the call comes from the forward method of a `torch.autograd.Function` with a backward pass to come."""
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "ctx":
            ctx = variable(frame, "ctx")
            if isinstance(ctx, FunctionCtx):
                return any(ctx.needs_input_grad)  # type: ignore[attr-defined]
        frame = frame.f_back
    return False
