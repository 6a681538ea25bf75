"""Which modules' forwards are under way, found without touching any module."""

from __future__ import annotations

import inspect
from types import FrameType
from typing import Any, cast

from torch import nn

MODULE_CALL = nn.Module.__call__.__code__


def variable(frame: FrameType, name: str) -> Any:
    """A variable of a function that runs; None if it has none of that name.

    Before Python 3.13 a frame keeps what `f_locals` has shown until it is asked again: tensors that the function has
    let go of would live on because somebody has looked.
    """
    shown = frame.f_locals
    value = shown.get(name)
    if isinstance(shown, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a copy, and no module's namespace
        shown.clear()
    return value


class RunningModules:
    """The modules of a model whose forward runs, called as usual or directly, as for recomputation.

    Args:
        root: The model.

    Attributes:
        names: Of each module by its `id`, as of the last `update`.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self.names: dict[int, str] = {}
        self._codes = {MODULE_CALL}

    def update(self) -> None:
        """Look at the model again."""
        self.names = {id(module): name for name, module in self._root.named_modules()}
        kinds = {base for module in self._root.modules() for base in type(module).__mro__}
        forwards = (inspect.unwrap(vars(kind)["forward"]) for kind in kinds if "forward" in vars(kind))
        codes = (getattr(forward, "__code__", None) for forward in forwards)
        self._codes = {MODULE_CALL, *(code for code in codes if code is not None and code.co_argcount)}

    def now(self) -> list[nn.Module]:
        """Those that run in this thread, innermost first."""
        running: list[nn.Module] = []
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_code in self._codes:
                called = variable(frame, frame.f_code.co_varnames[0])
                if id(called) in self.names and (not running or running[-1] is not called):
                    running.append(cast(nn.Module, called))
            frame = frame.f_back
        return running
