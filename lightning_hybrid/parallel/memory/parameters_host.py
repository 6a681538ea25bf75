"""Parameters that stay in host memory when a model moves, and what reads them there while the device computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_hybrid.compat import APPLY, storage_key
from lightning_hybrid.functional.trees import leaves_of, map_leaves

AT_HOME = frozenset({"copy_", "set_", "__set__", "to", "type_as", "grad", "backward"})
"""Functions that may have tensors of both sides."""


class _AroundApply:
    """Stands for a module's method that changes all tensors. Copies of the module have their class's own."""

    def __init__(self, module: nn.Module, changed: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> None:
        self.module, self.changed, vars(module)[APPLY] = module, changed, self

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return getattr(type(self.module), APPLY)(self.module, partial(self.changed, fn), recurse)

    def __reduce__(self) -> Any:
        return getattr, (self.module, APPLY)


class HostParameters:
    """Lets a model's parameters stay on the host when it is moved, until `release`; other changes are made there.

    Args:
        root: The model. Its buffers move.

    Attributes:
        resident: Parameters that move nevertheless.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root, self.resident = root, set[nn.Parameter]()
        _AroundApply(root, self._changed)

    def release(self) -> None:
        """Let everything move again."""
        if isinstance(vars(self._root).get(APPLY), _AroundApply):
            del vars(self._root)[APPLY]

    def _changed(self, change: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
        changed = change(tensor)
        if not isinstance(tensor, nn.Parameter) or tensor in self.resident or changed.is_meta:
            return changed
        if tensor.is_meta:
            return changed.to("cpu")
        same = changed.dtype == tensor.dtype and changed.stride() == tensor.stride()
        return tensor if same and changed.device != tensor.device else changed.to(tensor.device)


class StrayReads(TorchFunctionMode):
    """Context in which parameters on the host that are used together with tensors of the device are brought to it.

    That happens where code reads a parameter past the call of its module, such as `F.linear(x, self.embed.weight)`.
    Gradients find their way back.

    Args:
        parameters: Those on the host.
        device: The device.

    Attributes:
        found: Those that were read so.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
        super().__init__()
        self._parameters = {storage_key(parameter): parameter for parameter in parameters}
        self._device = device
        self.found: list[nn.Parameter] = []

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        mixed = len({tensor.device.type for tensor in tensors}) > 1
        if mixed and getattr(func, "__name__", "") not in AT_HOME:
            args, kwargs = map_leaves(self._bring, (args, kwargs))
        return func(*args, **kwargs)

    def _bring(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.device.type != "cpu" or leaf.layout is not torch.strided:
            return leaf
        parameter = self._parameters.get(storage_key(leaf))
        if parameter is None:
            return leaf
        if not any(parameter is other for other in self.found):
            self.found.append(parameter)
        return leaf.to(self._device)


@torch.no_grad()
def move(parameter: nn.Parameter, device: torch.device, *, pin: bool = False) -> None:
    """Give a parameter, and its gradient, memory elsewhere.

    Args:
        parameter: It stays the same object.
        device: Where.
        pin: In memory that the accelerator can read while the host does something else.
    """
    for tensor in (parameter, parameter.grad):
        if tensor is not None and not tensor.is_meta:
            moved = tensor.data.to(device)
            if pin and tensor is parameter and not moved.is_pinned():
                moved = moved.pin_memory()
            if moved.data_ptr() != tensor.data_ptr():
                tensor.data = moved


def move_states(optimizers: Iterable[Optimizer]) -> None:
    """Let the states of optimizers lie where their parameters are; counts of steps stay."""
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for name, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Tensor) and not name.endswith("step"):
                    state[name] = value.to(parameter.device)
