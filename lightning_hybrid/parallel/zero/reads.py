"""Finds out which modules are read past their own call, in a dry run: their parameters must be whole all the time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_hybrid.compat import storage_key
from lightning_hybrid.functional.trees import leaves_of
from lightning_hybrid.parallel.tensor.split_tensor import part_of

METADATA = frozenset(
    {
        "__get__",
        "size",
        "dim",
        "numel",
        "is_floating_point",
        "element_size",
        "stride",
        "is_contiguous",
        "untyped_storage",  # probes ask for it, to know tensors again
    }
)
"""Functions that look at no value; a value that `.data` or `.T` returns is seen where it is used."""


class ReadWatch(TorchFunctionMode):
    """Context that notes modules whose parameters are used while none of their calls runs.

    `fully_shard` gathers a module's parameters when the module is called. Code that reads them in another way, such as
    `F.linear(x, self.embed.weight)`, a loop over `self.parameters()` or a call of a block's child, would meet shards.

    Args:
        root: The model.
        names: Modules that may be gathered by their calls.

    Attributes:
        found: Names of those that are read past their calls.
    """

    def __init__(self, root: nn.Module, names: Iterable[str]) -> None:
        super().__init__()
        self._root, self._names = root, list(names)
        self.found: set[str] = set()
        self._running: Counter[str] = Counter()
        self._owners: dict[int, set[str]] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> ReadWatch:
        for name in self._names:
            module = self._root.get_submodule(name)
            for parameter in module.parameters():
                self._owners.setdefault(storage_key(parameter), set()).add(name)
            self._hooks.append(module.register_forward_pre_hook(partial(self._start, name), prepend=True))
            self._hooks.append(module.register_forward_hook(partial(self._stop, name), always_call=True))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._owners.clear()
        self._running.clear()

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") not in METADATA:
            for leaf in leaves_of((args, kwargs)):
                if isinstance(leaf, Tensor):
                    self._note(part_of(leaf))
        return func(*args, **(kwargs or {}))

    def _note(self, tensor: Tensor) -> None:
        owners = self._owners.get(storage_key(tensor), ()) if tensor.layout is torch.strided else ()
        self.found.update(name for name in owners if not self._running[name])

    def _start(self, name: str, *_: Any) -> None:
        self._running[name] += 1

    def _stop(self, name: str, *_: Any) -> None:
        self._running[name] -= 1
