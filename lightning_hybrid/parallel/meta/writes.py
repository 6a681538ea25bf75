"""Contexts that watch what initialisers do: which memory they write, and whether they read what is not there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_hybrid.compat import TorchDispatchMode, storage_key, written_tensors
from lightning_hybrid.functional.trees import leaves_of


class Writes(TorchDispatchMode):
    """Context that notes which memory is written to.

    Attributes:
        seen: Its `storage_key`s.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = set[int]()

    @override
    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.seen.update(storage_key(tensor) for tensor in written_tensors(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


class Apart(TorchDispatchMode):
    """Context of an initialiser of a module that contains blocks, while only a part of the model has memory.

    Many operations of a tensor with one on the meta device do nothing at all, without an error.

    Args:
        name: Dotted name of the module.
        module: The module.

    Raises:
        ValueError: On leaving, if the initialiser failed, or read values of another part.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self._who = f"{name or 'the model'} ({type(module).__name__})"

    @override
    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [tensor for tensor in tensors if not tensor.is_meta]
        if 0 < len(there) < len(tensors) and (any(t.ndim for t in there) or written_tensors(func, tuple(there), {})):
            raise RuntimeError(f"{func} of a tensor that has memory with one that has none")
        return func(*args, **(kwargs or {}))

    @override
    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, Exception):
            raise ValueError(
                f"{self._who} contains blocks, and what initialises it failed ({type(error).__name__}: {error}). It "
                "runs once for each part of the model that it writes to, while all else is on the meta device, so that "
                "it can read no values. Initialise in the modules that own the tensors, or build the model on a real "
                "device: with torch.device('cpu')."
            ) from error
